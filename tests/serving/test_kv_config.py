"""Goal: what cannot work in `[kv]` is refused with the key, what was received and what expected.

Method: one change at a time to the defaults.
"""

import pytest

from serving.config import ServingConfig
from sharding.config_file import ConfigError, override_from_text


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("kv.storage=tape", "storage.*off.*memory.*disk"),
        ("kv.storage=disk", "directory: received nothing; expected a directory"),
        ("kv.host_bytes=10", "host_bytes: received 10; expected at least 65536"),
        ("kv.disk_bytes=10", "disk_bytes"),
        ("kv.segment_bytes=10", "segment_bytes"),
        ("kv.tenant_bytes=-1", "tenant_bytes: received -1; expected 0"),
        ("kv.ttl_s=-1", "ttl_s"),
        ("kv.sightings_min=0", "sightings_min"),
        ("kv.storage=erasure", "kv.erasure.nodes: received none; expected at least"),
        ("kv.storage=object", "object.kvstore: received nothing; expected a URL"),
        ("kv.erasure.data_fragments=0", "data_fragments: received 0; expected 1 to"),
        ("kv.erasure.parity_fragments=23", "received 33; expected at most 32"),
        ("kv.erasure.read_s=0", "read_s"),
        ("kv.erasure.repair_bytes_per_s=1", "repair_bytes_per_s"),
        ("kv.object.refresh_s=0", "refresh_s"),
        ("kv.mooncake.segment_bytes=-1", "segment_bytes"),
        ("kv.mooncake.protocol=pigeon", "protocol.*tcp.*rdma"),
        ("kv.wait_s=0", "wait_s: received 0.*expected more than 0, to 5"),
        ("kv.wait_s=6", "wait_s: received 6"),
        ("kv.retry_s=inf", "retry_s"),
        ("kv.flush_s=nan", "flush_s"),
    ],
)
def test_unusable_values_are_refused(assignment: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        override_from_text(ServingConfig(), [assignment])


def test_whether_anything_is_kept() -> None:
    assert not ServingConfig().kv.is_on
    nodes = "kv.erasure.nodes.a=ipc://a"
    chosen = override_from_text(ServingConfig(), ["kv.storage=erasure", nodes]).kv
    assert chosen.is_on and chosen.erasure.nodes == {"a": "ipc://a"}


def test_what_a_storage_does_not_know_is_refused() -> None:
    for changes, expected in (
        (("kv.storage=mooncake", "kv.tenant_bytes=9"), "tenant_bytes: received 9; expected 0 with"),
        (("kv.storage=memory", "kv.metadata=ipc://m"), "metadata: received ipc://m; expected noth"),
    ):
        with pytest.raises(ConfigError, match=expected):
            override_from_text(ServingConfig(), changes)
