"""Goal: whatever happens to storage nodes, to the cache process or to the metadata node, a real
model gives the tokens of a cold run, and what was stored is used again afterwards.

Method: one compiled model in this process, with an engine of its own for each run, so that whatever
is used again has come from the tiers. These are all processes of their own: six storage nodes with
a code of three and two, a metadata node, and the cache processes. Signals are sent when the engine
has made so many calls to its cache: while it reads and while it writes.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from scripts.kv_bench.swap_in import Bench, cache
from scripts.trace_swap_in import Copy, copies_in
from serving import LLM, SamplingParams
from serving.config import ServingConfig
from serving.engine.kv_moves import CacheOwner
from serving.kv.link import CacheLink
from serving.kv.offload import CacheCall, CachePort, CacheReply
from serving.kv_config import ErasureOptions, KVOptions
from serving.kv_process import CacheProcess, ask
from serving.loading import LoadedModel, load_model
from serving.transport.driver import SystemClock
from sharding.config_file import override
from tests.serving.kv.storage_parts import NodeProcesses, wait_until
from tests.serving.node_processes import NodeProcess, nodes

NUM_NODES = 6
LENGTH = 300
NUM_CACHED = 256
NUM_PAYLOADS = NUM_CACHED // 128 + 1
"""Of one prompt: blocks, and a state."""

OPTIONS = {
    "engine.max_context": 1024,
    "engine.num_blocks": 65,
    "engine.prefill_tokens": [64],
    "engine.decode_rows": [8],
    "model.cache_format": "noq",
    "kv.storage": "memory",
    "kv.model_revision": "golden",
    "kv.wait_s": 5.0,
}

Answers = list[list[int]]


@dataclass(frozen=True)
class Model:
    """A compiled model, and what it answers on its own."""

    config: ServingConfig
    loaded: LoadedModel

    def run(
        self, cache: CachePort | None, numbers: Sequence[int], wait_s: float = 5.0
    ) -> tuple[Answers, list[int]]:
        """Tokens that follow each prompt, and how many of the prompt's own were not computed."""
        config = override(self.config, {"kv.wait_s": wait_s})
        llm = LLM.of_model(config, self.loaded, cache)
        sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        outputs = llm.generate([prompt_of(number) for number in numbers], sampling)
        status = llm._engine.status()
        assert status.num_free_blocks == status.num_blocks
        assert status.num_free_slots == status.num_slots
        return [one.token_ids for one in outputs], [one.cached_tokens for one in outputs]


def prompt_of(number: int) -> list[int]:
    return [(7 * i * i + (3 + number) * i) % 290 + 5 for i in range(LENGTH)]


class Watched:
    """Carries calls, and does something at a call of a given number."""

    def __init__(self, link: CacheLink, work: dict[int, Callable[[], object]]) -> None:
        self._link = link
        self._work = work
        self._num_calls = 0

    def call(self, call: CacheCall, reply: Callable[[CacheReply], None]) -> None:
        self._link.call(call, reply)
        self._num_calls += 1
        self._work.pop(self._num_calls, lambda: None)()


class Tiers:
    """A cache process, a line to it, and the cold run's answers."""

    def __init__(self, model: Model, cold: Answers, process: CacheProcess, link: CacheLink) -> None:
        self.model = model
        self.cold = cold
        self.process = process
        self.link = link

    def numbers(self) -> dict[str, float | int]:
        return ask(self.process.address, "stats")

    def check(self, numbers: Sequence[int], wait_s: float = 5.0, **work: Any) -> list[int]:
        """Compare with the cold run; how many tokens of each prompt were not computed.

        `work` is done at calls to the cache, such as `at_3`.
        """
        at_calls = {int(name.removeprefix("at_")): action for name, action in work.items()}
        answers, cached = self.model.run(Watched(self.link, at_calls), numbers, wait_s)
        assert answers == [self.cold[number] for number in numbers]
        assert not at_calls, "fewer calls than expected"
        return cached

    def store(self, numbers: Sequence[int], count: str) -> None:
        """Compute prompts and wait until all of them are in storage, which counts under a name."""
        before = self.numbers()[count]
        self.check(numbers)

        def is_stored() -> bool:
            ask(self.process.address, "flush")
            return self.numbers()[count] - before >= NUM_PAYLOADS * len(numbers)

        wait_until(is_stored, "what was computed is stored", 60)

    def wait_for_hits(self, numbers: Sequence[int]) -> None:
        """Wait until all of it is used; before that, too, nothing may differ."""
        expected = [NUM_CACHED] * len(numbers)
        wait_until(lambda: self.check(numbers) == expected, "all that was stored is used", 60)
        names = ("leases", "writes", "host_pinned", "unwritten")
        wait_until(lambda: not any(self.numbers()[name] for name in names), "all is let go of")


@pytest.fixture(scope="module")
def model(golden: Path) -> Model:
    config = override(ServingConfig(), {**OPTIONS, "model.path": str(golden / "tiny-v41")})
    return Model(config, load_model(config, lambda line: None))


@pytest.fixture(scope="module")
def cold(model: Model) -> Answers:
    answers, cached = model.run(None, range(16))
    assert not any(cached) and len(set(map(tuple, answers))) == len(answers)
    return answers


@contextmanager
def opened(
    model: Model, cold: Answers, options: KVOptions, arguments: Sequence[str]
) -> Iterator[Tiers]:
    """A cache process with its own memory."""
    facts = model.loaded.facts
    assert facts.kv_form is not None
    process = CacheProcess(options, arguments)
    with ExitStack() as stack:
        stack.callback(process.stop)
        process.wait_until_ready()
        link = CacheLink(process.address, facts.kv_form, SystemClock())
        link.start()
        stack.callback(link.close)
        yield Tiers(model, cold, process, link)


def words(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


@pytest.mark.timeout(600)
def test_tokens_stay_the_same_whatever_happens_to_storage_nodes(
    tmp_path: Path, model: Model, cold: Answers
) -> None:
    with ExitStack() as stack:
        storage = NodeProcesses(tmp_path, NUM_NODES)
        stack.callback(storage.close)
        arguments = words(
            "kv.storage='erasure'",
            "kv.host_bytes=16777216",
            "kv.flush_s=0.1",
            f"kv.memory_directory='{tmp_path}'",
            "kv.erasure.data_fragments=3",
            "kv.erasure.parity_fragments=2",
        )
        options = KVOptions(
            storage="erasure", directory=str(tmp_path), erasure=ErasureOptions(storage.addresses)
        )
        arguments += storage.options()
        tiers = stack.enter_context(opened(model, cold, options, arguments))
        names = list(storage.addresses)

        def send(number: signal.Signals, *to: str) -> None:
            for name in to:
                storage.signal(name, number)

        def wait_for_nodes(num_away: int) -> None:
            wait_until(
                lambda: tiers.numbers()["storage_nodes_away"] == num_away, f"{num_away} are away"
            )

        tiers.store(range(10), "storage_payloads")
        # From here on memory is empty: what is read for the first time is in storage alone.
        os.kill(tiers.process.pid, signal.SIGKILL)
        tiers.wait_for_hits([0])

        # Two of six are stopped: degraded reads. A third: too little is left of most stripes, and
        # what is computed cannot be stored either. All of it while prompts are read and written.
        send(signal.SIGSTOP, *names[:2])
        tiers.wait_for_hits([1])
        tiers.check([2, 3, 10, 11], at_2=lambda: send(signal.SIGSTOP, names[2]))
        wait_for_nodes(3)
        tiers.check([4, 12, 5, 13], at_3=lambda: send(signal.SIGCONT, *names[:3]))
        wait_for_nodes(0)
        tiers.wait_for_hits([2, 3, 4, 5])

        # Two are killed in the middle, and start anew in the middle.
        tiers.check([6, 14, 15], at_3=lambda: send(signal.SIGKILL, *names[3:5]))
        tiers.wait_for_hits([6])
        tiers.check([7], at_1=lambda: [storage.start(name) for name in names[3:5]])
        wait_for_nodes(0)
        tiers.wait_for_hits([7])

        # The cache process is killed while it waits for nodes that do not answer.
        looked_up = "storage_look_up_seconds_count"
        before = tiers.numbers()[looked_up]

        def kill_mid_fetch() -> None:
            # What is found is read at once.
            wait_until(lambda: tiers.numbers()[looked_up] > before, "storage is being read")
            os.kill(tiers.process.pid, signal.SIGKILL)

        send(signal.SIGSTOP, *names[:4])
        assert tiers.check([8], 1.0, at_1=kill_mid_fetch) == [0]
        send(signal.SIGCONT, *names[:4])
        tiers.wait_for_hits(range(10))


@pytest.mark.timeout(600)
def test_tokens_stay_the_same_when_metadata_starts_anew_with_nothing(
    tmp_path: Path, model: Model, cold: Answers
) -> None:
    address = f"ipc://{tmp_path}/m"
    settings = {"directory": str(tmp_path), "disk_bytes": 2**26}
    options = KVOptions(storage="disk", directory=str(tmp_path), metadata=address)
    arguments = words(
        "kv.storage='disk'",
        f"kv.directory='{tmp_path}'",
        f"kv.metadata='{address}'",
        "kv.host_bytes=16777216",
        "kv.flush_s=0.1",
    )
    with nodes() as running:
        running.append(NodeProcess("metadata", address, settings))
        with opened(model, cold, options, arguments) as tiers:
            tiers.store(range(3), "storage_written")
            os.kill(tiers.process.pid, signal.SIGKILL)
            tiers.wait_for_hits([0])
            running.pop().kill()
            # Nobody knows where anything is.
            assert tiers.check([1], 1.0) == [0]
            for folder in tmp_path.glob("metadata-*"):
                shutil.rmtree(folder)
            running.append(NodeProcess("metadata", address, settings))
            tiers.wait_for_hits(range(3))


def test_a_trace_shows_later_layer_groups_copied_while_earlier_layers_compute(
    tmp_path: Path, model: Model
) -> None:
    assert model.loaded.facts.kv_form is not None
    moves = cast("CacheOwner", model.loaded.executor).kv_moves
    assert moves is not None
    part_of_group = moves._swap_ins._part_of_group
    hidden: list[Copy] = []
    with cache(tmp_path, model.loaded.facts.kv_form) as link:
        bench = Bench(model.config, model.loaded, link)
        # On a busy machine a part may begin to compute only when everything is dispatched.
        for number in range(20):
            bench.trace(LENGTH, tmp_path / str(number))
            copies = copies_in(tmp_path / str(number))
            assert [copy.group for copy in copies] == list(range(len(part_of_group)))
            hidden += [copy for copy in copies if copy.hidden_ns]
            if hidden:
                break
    assert hidden, "no copy overlaps the work of a part"
    for copy in hidden:
        assert max(copy.parts) < part_of_group[copy.group]
