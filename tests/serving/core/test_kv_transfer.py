"""Goal: a transfer says whether anything comes back. Method: one of each kind."""

import numpy as np

from serving.core.kv_transfer import KVTransfer

ONE = np.ones(1, np.int32)


def test_what_reads() -> None:
    assert KVTransfer(1, read_blocks=ONE).is_reading
    assert KVTransfer(1, read_slots=ONE).is_reading
    assert not KVTransfer(1).is_reading
    assert not KVTransfer(1, write_blocks=ONE, write_slots=ONE).is_reading
