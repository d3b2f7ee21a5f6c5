"""Goal: the configuration reads from TOML, its defaults are the shipped file, and what cannot work
is refused with the key, the received value and what was expected.

Method: files written for each case, and the shipped file compared with the defaults.
"""

from pathlib import Path

import pytest

from serving.config import (
    CONFIGS_DIR,
    DEFAULT_CONFIG,
    DEFAULT_MODEL_DIR,
    TIER_ROLES,
    WORKER_ROLES,
    ServingConfig,
    load_config,
)
from sharding.config_file import ConfigError, override_from_text


def test_shipped_file_states_every_default() -> None:
    assert load_config() == ServingConfig()
    text = DEFAULT_CONFIG.read_text()
    config = ServingConfig()
    tables = (config.model, config.server, config.engine, config.images, config.cluster)
    for table in (*tables, config.kv, config.kv.erasure, config.kv.object, config.kv.mooncake):
        for name in table.__dataclass_fields__:
            is_there = f"\n{name} = " in text or f".{name}]" in text
            assert is_there, f"{name} is not in {DEFAULT_CONFIG.name}"


def test_file_states_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[server]\nport = 9000\n[model]\ncache_format = "noq"\n')
    config = load_config(path)
    assert config.server.port == 9000 and config.model.cache_format == "noq"
    assert config.engine == ServingConfig().engine


def test_model_directory_and_name() -> None:
    default = ServingConfig().model
    assert default.directory == DEFAULT_MODEL_DIR and default.served_name == "small-v41"
    other = override_from_text(ServingConfig(), ["model.path=/models/big/"]).model
    assert other.directory == Path("/models/big") and other.served_name == "big"
    named = override_from_text(ServingConfig(), ["model.name=mine"]).model
    assert named.served_name == "mine"


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("server.port=70000", "server.*port: received 70000; expected 0 to 65535"),
        ("server.prot=1", "unknown key"),
        ("server.drain_s=-1", "drain_s: received -1"),
        ("server.body_bytes_max=0", "body_bytes_max: received 0; expected at least 1"),
        ("server.body_s=0", "body_s: received 0"),
        ("server.head_s=0", "head_s: received 0"),
        ("server.head_bytes_max=0", "head_bytes_max: received 0"),
        ("server.log_format=xml", "log_format"),
        ("server.prompts_max=0", "prompts_max"),
        ("server.backlog_tokens_max=0", "backlog_tokens_max"),
        ("engine.max_context=0", "max_context"),
        ("engine.decode_rows=[8, 1]", "decode_rows: received .8, 1.; expected .* ascending"),
        ("engine.prefill_tokens=[]", "prefill_tokens"),
        ("engine.prefill_tokens=[0]", "prefill_tokens"),
        ("engine.prefill_rows=0", "prefill_rows"),
        ("engine.prefill_time_budget_ms=-1", "prefill_time_budget_ms: received -1.*expected 0 to"),
        ("engine.prefill_time_budget_ms=nan", "prefill_time_budget_ms"),
        ("engine.replay=half", "replay.*off.*mask.*compact"),
        ("engine.replay_keep=0", "replay_keep: received 0; expected 1 to"),
        ("engine.waiting_max=0", "waiting_max"),
        ("engine.step_timeout_s=0", "step_timeout_s"),
        ("engine.step_timeout_s=inf", "step_timeout_s: received inf; expected more than 0"),
        ("server.drain_s=inf", "drain_s: received inf"),
        ("engine.num_blocks=1000000000000", "num_blocks: received 1000000000000; expected 1 to"),
        ("engine.prefix_snapshots=1000000000000", "prefix_snapshots"),
        ("engine.grammar_timeout_s=0", "grammar_timeout_s"),
        ("quotas.default.tokens_per_minute=-1", "tokens_per_minute: received -1; expected 0"),
        ("quotas.acme.tokens=1", "unknown key"),
        ("images.per_request_max=-1", "per_request_max: received -1; expected 0 or more"),
        ("images.bytes_max=0", "bytes_max"),
        ("images.pixels_max=0", "pixels_max"),
        ("model.cache_format=int4", "cache_format"),
        ("model.engram=disk", "engram.*device.*host"),
        ("engine.num_blocks=many", "num_blocks"),
    ],
)
def test_unusable_values_are_refused(assignment: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        override_from_text(ServingConfig(), [assignment])


CLUSTER = """
[cluster]
directory = "run"
[cluster.nodes.p]
role = "prefill"
[cluster.nodes.d]
role = "decode"
"""


def test_clusters_know_where_their_nodes_listen(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER + 'address = "tcp://10.0.0.7:7001"\n')
    cluster = load_config(path).cluster
    assert cluster.is_on and not ServingConfig().cluster.is_on
    assert cluster.address_of("d") == "tcp://10.0.0.7:7001"
    assert cluster.address_of("p") == f"ipc://{Path('run').resolve()}/p.sock"
    assert cluster.address_of("router") == f"ipc://{Path('run').resolve()}/router.sock"
    assert ServingConfig().cluster.address_of("router") == ""
    deployed = load_config(CONFIGS_DIR.parent / "deploy" / "cluster.toml").cluster
    assert deployed.address_of("prefill-1") == "tcp://prefill-1.prefill:7001"
    shipped = load_config(CONFIGS_DIR / "disaggregated.toml").cluster
    counts = {role: len(shipped.named(role)) for role in (*WORKER_ROLES, *TIER_ROLES)}
    assert counts == {"prefill": 2, "decode": 2, "vision": 1, "storage": 12, "metadata": 1}


TIERS = """
[cluster.nodes.m]
role = "metadata"
[cluster.nodes.s]
role = "storage"
[kv]
storage = "erasure"
[kv.erasure]
data_fragments = 1
parity_fragments = 1
[kv.erasure.nodes]
t = "tcp://10.0.0.8:7002"
"""


def test_nodes_of_a_cluster_are_where_tiers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER + TIERS)
    tiers, here = load_config(path).tiers, f"ipc://{Path('run').resolve()}"
    assert tiers.erasure.nodes == {"s": f"{here}/s.sock", "t": "tcp://10.0.0.8:7002"}
    assert tiers.directory == "run/kv" and tiers.metadata == ""
    assert load_config(path).cluster.metadata == f"{here}/m.sock"
    path.write_text(CLUSTER + '[cluster.nodes.m]\nrole = "metadata"\n[kv]\nstorage = "disk"\n')
    with path.open("a") as file:
        file.write('directory = "d"\n')
    tiers = load_config(path).tiers
    assert tiers.metadata == f"{here}/m.sock" and tiers.directory == "d"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"erasure"', '"memory"', "cluster.nodes.s: received a storage node; expected kv.storage"),
        ("data_fragments = 1", "data_fragments = 2", "cluster.nodes: received 2 storage nodes"),
        ('nodes.s]\nrole = "storage"', 'nodes.s]\nrole = "metadata"', "nodes: received m/s; exp"),
        ("nodes.s]", "nodes.cache]", "nodes.cache: received a node; expected another name"),
    ],
)
def test_tiers_that_cannot_work_are_refused(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER + TIERS.replace(old, new))
    with pytest.raises(ConfigError, match=expected):
        load_config(path)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('role = "decode"', 'role = "prefill"', "nodes: received p/d; expected a decode worker"),
        ('role = "prefill"', 'role = "decode"', "nodes: received p/d; expected a prefill worker"),
        ('role = "decode"', 'role = "cook"', "nodes.d.role: received .cook.; expected one of"),
        ("nodes.d]", "nodes.router]", "nodes.router: received a node; expected another name"),
        ('directory = "run"', "lost_s = 0.7", "lost_s: received 0.7; expected at least 1"),
        ('directory = "run"', "answer_s = 0", "answer_s: received 0"),
        ('directory = "run"', "local_prefill_ms = -1", "local_prefill_ms: received -1"),
        ('role = "decode"', 'role = "decode"\naddress = "tcp://*:1"', "nodes.d.address: received"),
        (
            'role = "decode"',
            'role = "decode"\naddress = "tcp://h:1"\n[cluster.nodes.e]\nrole = "decode"\n'
            'address = "tcp://h:1"',
            "nodes.e.address: received tcp://h:1; expected another one than that of d",
        ),
    ],
)
def test_clusters_that_cannot_work_are_refused(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.replace(old, new))
    with pytest.raises(ConfigError, match=expected):
        load_config(path)
