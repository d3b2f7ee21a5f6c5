"""The table `[kv]` of the serving configuration and those below it; see `serving.config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sharding.config_file import check

SECONDS_MAX = 1e6
"""Longer waits are a slip of the pen: eleven days."""


@dataclass(frozen=True, slots=True)
class ErasureOptions:
    """Stripes over storage nodes, for `kv.storage = "erasure"`.

    `nodes`: addresses by name, beside the storage nodes of `[cluster]`; those that know each other
    need not all be named.
    `data_fragments`, `parity_fragments`: of each stripe, on as many nodes; any `data_fragments` of
    them give all of it back.
    `read_s`, `write_s`: how long a read and a write may take; what has not come then is a miss.
    `repair_after_s`: what a node holds that was silent for so long is made anew on others,
    `repair_bytes_per_s`: at this rate.
    """

    nodes: Mapping[str, str] = field(default_factory=dict[str, str])
    data_fragments: int = 10
    parity_fragments: int = 2
    read_s: float = 1.0
    write_s: float = 10.0
    repair_after_s: float = 60.0
    repair_bytes_per_s: int = 64 * 2**20

    def __post_init__(self) -> None:
        for name in ("data_fragments", "parity_fragments"):
            count = getattr(self, name)
            check(1 <= count <= 28, name, count, "1 to 28")
        count = self.data_fragments + self.parity_fragments
        check(count <= 32, "data_fragments and parity_fragments", count, "at most 32 together")
        for name in ("read_s", "write_s", "repair_after_s"):
            seconds = getattr(self, name)
            check(0 < seconds <= SECONDS_MAX, name, seconds, f"more than 0, to {SECONDS_MAX:g}")
        rate = self.repair_bytes_per_s
        check(rate >= 2**16, "repair_bytes_per_s", rate, "at least 65536")


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """An object store, for `kv.storage = "object"`.

    `kvstore`: a key-value store of TensorStore, as a URL such as `s3://bucket/folder/` or as JSON.
    `refresh_s`: how often it is looked through for what others have written.
    `read_s`, `write_s`: how long a read and a write may take; what has not come then is a miss.
    """

    kvstore: str = ""
    refresh_s: float = 10.0
    read_s: float = 1.0
    write_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("refresh_s", "read_s", "write_s"):
            seconds = getattr(self, name)
            check(0 < seconds <= SECONDS_MAX, name, seconds, f"more than 0, to {SECONDS_MAX:g}")


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """A Mooncake Store, for `kv.storage = "mooncake"`.

    `master`: address of its master.
    `metadata`: where its clients find each other; a URL, or `P2PHANDSHAKE`.
    `hostname`: this machine, as the others reach it.
    `protocol`, `devices`: of the transfers: `tcp`, or `rdma` over these devices.
    `segment_bytes`: memory of this machine that it may use; 0 for none.
    """

    master: str = "127.0.0.1:50051"
    metadata: str = "P2PHANDSHAKE"
    hostname: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    segment_bytes: int = 512 * 2**20

    def __post_init__(self) -> None:
        check(self.segment_bytes >= 0, "segment_bytes", self.segment_bytes, "0 or more")


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """What one tenant may have in each tier, in place of `kv.tenant_bytes` and `kv.ttl_s`.

    `bytes`: 0 is no limit.
    `ttl_s`: how long a stored block may be used after it was computed; 0 is no limit.
    """

    bytes: int = 0
    ttl_s: int = 0

    def __post_init__(self) -> None:
        for name in ("bytes", "ttl_s"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 (no limit) or more")


@dataclass(frozen=True, slots=True)
class KVOptions:
    """Where computed prefixes are kept beyond device memory.

    `storage`: `off` keeps none; `memory` keeps them in shared memory only, the others also
    elsewhere: `disk` in `directory`, `erasure` on storage nodes, `object` in an object store and
    `mooncake` in a Mooncake Store, each as its own table says.
    `directory`: of the disk tier, which one cache process uses alone, and of a storage node.
    `address`: of a cache process that runs already; empty starts one for this server.
    `metadata`: address of the metadata node of a store that several hosts use; empty for a store
    of one cache process.
    `memory_directory`: a memory file system for the shared memory.
    `host_bytes`, `disk_bytes`: how large shared memory and storage may become; the fragments on all
    storage nodes count, and a Mooncake Store has a limit of its own.
    `tenant_bytes`: of one tenant, in each of them; 0 is no limit.
    `ttl_s`: how long a stored block may be used after it was computed; 0 is no limit.
    `tenants`: by the name of a tenant with keys, or by a `cache_salt`, limits of its own.
    `wait_s`: how long a request waits for its stored prefix before it computes it instead.
    `retry_s`: how long tiers that have failed are left alone.
    `sightings_min`: how often the end of a prompt must have been computed to be stored; 2 stores
    only what was seen again.
    `segment_bytes`, `flush_s`: what was computed is written when so much waits, or for so long.
    `lease_s`: what a worker or a host holds or writes is taken back after so long.
    `model_revision`: names the weights; empty computes a digest, which reads all of them.
    """

    storage: Literal["off", "memory", "disk", "erasure", "object", "mooncake"] = "off"
    directory: str = ""
    address: str = ""
    metadata: str = ""
    memory_directory: str = "/dev/shm"
    host_bytes: int = 256 * 2**20
    disk_bytes: int = 16 * 2**30
    tenant_bytes: int = 0
    ttl_s: int = 0
    tenants: Mapping[str, TenantOptions] = field(default_factory=dict[str, TenantOptions])
    wait_s: float = 1.0
    retry_s: float = 10.0
    sightings_min: int = 1
    segment_bytes: int = 16 * 2**20
    flush_s: float = 1.0
    lease_s: float = 60.0
    model_revision: str = ""
    erasure: ErasureOptions = field(default_factory=ErasureOptions)
    object: ObjectOptions = field(default_factory=ObjectOptions)
    mooncake: MooncakeOptions = field(default_factory=MooncakeOptions)

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "segment_bytes"):
            check(getattr(self, name) >= 2**16, name, getattr(self, name), "at least 65536")
        for name in ("tenant_bytes", "ttl_s"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 (no limit) or more")
        check(self.sightings_min >= 1, "sightings_min", self.sightings_min, "at least 1")
        # A client waits no longer than this for its admission, grammar included.
        check(0 < self.wait_s <= 5, "wait_s", self.wait_s, "more than 0, to 5")
        for name in ("retry_s", "flush_s", "lease_s"):
            seconds = getattr(self, name)
            check(0 < seconds <= SECONDS_MAX, name, seconds, f"more than 0, to {SECONDS_MAX:g}")
        if self.storage == "disk" and not self.address:
            check(bool(self.directory), "directory", "nothing", "a directory for storage = 'disk'")
        if self.storage == "mooncake":
            check(not self.tenant_bytes, "tenant_bytes", self.tenant_bytes, "0 with 'mooncake'")
        if self.storage in ("memory", "erasure", "mooncake"):
            expected = f"nothing with {self.storage!r}: its processes need none"
            check(not self.metadata, "metadata", self.metadata, expected)
        if self.storage == "object" and not self.address:
            given = bool(self.object.kvstore)
            check(given, "object.kvstore", "nothing", "a URL such as 's3://bucket/folder/'")

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.storage != "off"
