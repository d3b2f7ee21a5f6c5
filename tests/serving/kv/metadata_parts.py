"""A metadata node on a thread of this process, for tests of those who ask it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.config import KVOptions
from serving.kv_process import ask
from serving.metadata_process import run_metadata


@contextmanager
def metadata(tmp_path: Path, name: str = "0", **limits: float) -> Iterator[str]:
    """The address of a running metadata node whose folder is `metadata-NAME` of `tmp_path`."""
    address = f"ipc://{tmp_path}/m"
    options = KVOptions(directory=str(tmp_path), **limits)  # pyright: ignore[reportArgumentType]
    is_ready = threading.Event()
    thread = threading.Thread(
        target=run_metadata, args=(options, name, address, lambda _: is_ready.set())
    )
    thread.start()
    assert is_ready.wait(20)
    try:
        yield address
    finally:
        ask(address, "stop")
        thread.join(20)
        assert not thread.is_alive()
