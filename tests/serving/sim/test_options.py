"""Goal: the shipped fleet reads, and what cannot be a fleet is refused by name.
Method: the shipped file, and one wrong value for every check.
"""

import pytest

from serving.sim.options import FleetOptions, WorkerCounts
from serving.simulate import DEFAULT_FLEET
from sharding.config_file import ConfigError, load, override_from_text


def fleet() -> FleetOptions:
    return load(DEFAULT_FLEET, FleetOptions)


def test_the_shipped_fleet() -> None:
    assert fleet().counts == WorkerCounts(64, 64)
    assert fleet().decode.step_ms(10, 1000) == pytest.approx(6 + 10 * 0.243 + 1000 * 1.4e-7)


def test_workers() -> None:
    assert WorkerCounts.of("2p3d") == WorkerCounts(2, 3)
    assert WorkerCounts.of("2p3d4v") == WorkerCounts(2, 3, 4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("workers=64p0d", "workers: received '64p0d'; expected a number of prefill and one of"),
        ("workers=0p4d", "workers: received '0p4d'"),
        ("workers=64", "workers: received '64'"),
        ("prefill.unit=0", "unit: received 0; expected at least 1"),
        ("prefill.step_ms=5", "step_ms: received 5.* expected more than base_ms"),
        ("decode.base_ms=-1", "base_ms: received -1"),
        ("decode.tokens_per_step=0.5", "tokens_per_step: received 0.5; expected at least 1"),
        ("decode.tokens_spread=-1", "tokens_spread"),
        ("decode.unit=0", "unit: received 0"),
        ("decode.requests_max=0", "requests_max: received 0"),
        ("decode.context_max=0", "context_max: received 0"),
        ("decode.expected_output=-1", "expected_output: received -1"),
        ("vision.token_ms=0", "token_ms: received 0"),
        ("vision.image_tokens=0", "image_tokens: received 0"),
        ("links.gpus_per_machine=0", "gpus_per_machine"),
        ("links.machine_gb_s=0", "machine_gb_s: received 0"),
        ("links.between_ms=-1", "between_ms: received -1"),
        ("store.read_gb_s=0", "read_gb_s: received 0"),
        ("store.tokens_max=-1", "tokens_max: received -1"),
        ("store.visible=later", "visible: received later; expected computed or dispatched"),
        ("failures.decode_mean_s=-1", "decode_mean_s: received -1"),
        ("failures.repair_s=0", "repair_s: received 0.0; expected more than detect_ms, 1000"),
        ("failures.network_mean_s=-1", "network_mean_s: received -1"),
        ("failures.network_s=0", "network_s: received 0"),
        ("failures.store_s=0", "store_s: received 0.0; expected a number above 0"),
        ("target.ttft_ms=[1.0]", "ttft_ms: received .1.0,.; expected 4 numbers above 0"),
        ("target.itl_ms=0", "itl_ms: received 0"),
        ("prefill.speed=1", "unknown key"),
    ],
)
def test_a_wrong_value_is_refused(change: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        override_from_text(fleet(), [change])


def test_decode_steps_take_time() -> None:
    with pytest.raises(ConfigError, match="base_ms: received 0.0; expected a number above 0"):
        override_from_text(fleet(), ["decode.base_ms=0.0", "decode.row_ms=0.0"])
