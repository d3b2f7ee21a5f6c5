"""Goal: loading hands the configuration on as it is, and every unusable checkpoint is one clear
line, found before anything is compiled.

Method: damaged copies of the tiny checkpoint through the real loader; a recorder in place of the
executor where a whole load would only repeat what other tests do.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deepseek_recipe import SpecialToken

import serving.engine.jax_executor
import serving.engine.mesh_executor
from deepinfer_jax.steps import Watch
from serving.config import ServingConfig
from serving.core.buckets import TILE_TOKENS, Bucket, StepKind
from serving.core.cost import DecodeCost, PrefillCost
from serving.core.image_layout import ImageGeometry
from serving.core.replay import ReplayMode, ReplayRule
from serving.core.request import ConstraintKind, OutputConstraint
from serving.core.step_plan import StepPlan, StepResult
from serving.cost_file import write_cost_file
from serving.engine.step_records import RecordingExecutor
from serving.loading import load_model, recorded
from sharding.config_file import ConfigError, override
from tests.serving.running_service import MODEL_DIR
from tests.serving.scripted import ScriptedExecutor


def configured(**changes: object) -> ServingConfig:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return override(ServingConfig(), {"model.path": str(MODEL_DIR)} | dotted)


DRAFTING = {Bucket(3, 3, 2), Bucket(3, 9, 2), Bucket(3, 18, 2)}


def recording_executor(made: list[tuple[Any, ...]], directory: Path) -> Any:
    """A class in place of the executor, which keeps what it is made with in `made`."""

    class Recorder:
        model_config = SimpleNamespace(vocab_size=320, max_position_embeddings=99, eos_token_id=1)
        model = SimpleNamespace(num_replayed=45)
        image_geometry = ImageGeometry(318, 14, 3, 64, 1764)
        num_drafts = 5
        num_ranks = 1
        kv_moves = None
        cache_directory = directory
        identity = {"device": "recorder"}
        num_submitted = 0
        program_texts = staticmethod(lambda: iter(["HloModule jit_step"]))

        def __init__(self, *arguments: object, watch: Watch, **options: object) -> None:
            with watch("a step"):
                made.append((*arguments, options))

        def submit(self, plan: StepPlan) -> None:
            Recorder.num_submitted += 1

        def collect(self) -> StepResult:
            return StepResult(-1, np.zeros(0, np.int32))

    return Recorder


def test_configuration_reaches_the_executor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[tuple[Any, ...]] = []

    Recorder = recording_executor(made, tmp_path / "compiled")
    monkeypatch.setattr(serving.engine.jax_executor, "JaxExecutor", Recorder)
    lines: list[str] = []
    config = configured(
        model__cache_format="noq",
        engine__prefix_snapshots=5,
        engine__decode_rows=[3],
        engine__has_drafts=True,
        engine__prefill_time_budget_ms=50.0,
        engine__replay="compact",
        engine__replay_keep=99,
        engine__num_blocks=40,
        engine__max_context=256,
    )
    model = load_model(config, lines.append)
    assert lines.pop(0).startswith("compiled 1 programs in ")
    assert [line.split(":")[0] for line in lines] == [
        "measuring decode steps",
        "measuring prefill steps",
        "prefill steps",
    ]
    lines.clear()
    directory, cache_format, buckets, num_blocks, num_slots, mesh_plan, options = made[0]
    report = options.pop("report")
    rule = ReplayRule(ReplayMode.COMPACT, 99)
    assert (directory, cache_format) == (MODEL_DIR, "noq")
    assert options.pop("kv_clock") is None
    assert options == {"engram": "device", "has_drafts": True, "tile_tokens": 0, "replay": rule}
    assert set(buckets.of(StepKind.DECODE)) == DRAFTING
    assert (num_blocks, num_slots) == (40, 4 + 5), "three rows, padding and five snapshots"
    assert mesh_plan.num_devices == 1
    assert model.facts.images == Recorder.image_geometry
    assert model.codec.special_tokens.token(SpecialToken.Image) == "<｜deepseek_image｜>"
    report("a line")
    assert lines == ["a line"]
    assert list(model.program_texts()) == ["HloModule jit_step"]
    assert [program.name for program in model.programs] == ["a step"]
    facts = model.facts
    assert (facts.vocab_size, facts.max_position_embeddings, facts.eos_token_id) == (320, 99, 1)
    assert model.codec.encode_text("a")
    assert model.grammars is not None
    assert model.grammars.compile(OutputConstraint(ConstraintKind.JSON, ""))
    assert (facts.num_drafts, facts.step_ms.keys()) == (5, DRAFTING)
    assert facts.prefill_cost is not None
    assert facts.num_replayed == 45
    # The second time the figures are known.
    num_submitted = Recorder.num_submitted
    again = load_model(config, lines.append).facts
    assert (again.step_ms, again.prefill_cost) == (facts.step_ms, facts.prefill_cost)
    assert Recorder.num_submitted == num_submitted > 0
    plain = load_model(override(config, {"engine.prefill_time_budget_ms": 0.0}), lines.append)
    assert plain.facts.prefill_cost is None
    cost = PrefillCost(1.0, 0.5, 1e-6)
    write_cost_file(tmp_path / "cost.toml", cost, DecodeCost(1.0, 0.0, 0.0), "made up")
    given = load_model(configured(engine__cost_file=f"{tmp_path}/cost.toml"), lambda _: None)
    assert given.facts.prefill_cost == cost
    load_model(configured(model__engram="host", engine__batch_invariant=True), lines.append)
    options = made[-1][-1]
    assert (options["engram"], options["has_drafts"]) == ("host", False)
    assert (options["tile_tokens"], options["replay"]) == (TILE_TOKENS, None)
    load_model(configured(kv__storage="memory"), lines.append)
    assert made[-1][-1]["kv_clock"]() > 0


def test_drafts_need_engram_tables_on_the_device() -> None:
    with pytest.raises(ConfigError, match="engine.has_drafts is true and model.engram is 'host'"):
        load_model(configured(engine__has_drafts=True, model__engram="host"), print)


def test_engram_placement_of_the_mesh_holds(tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text('engram = "host"\n[mesh]\ndata = 1\n')
    with pytest.raises(ConfigError, match="engine.has_drafts is true and engram of .*host.toml is"):
        load_model(configured(engine__has_drafts=True, sharding=str(file)), print)


def test_a_mesh_that_can_only_be_planned_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decode_ep64: redundant_experts is 64.*expected 0"):
        load_model(configured(sharding="decode_ep64"), print)
    with pytest.raises(ConfigError, match="decode_b200x4: micro_batches is 2.*expected 1"):
        load_model(configured(sharding="decode_b200x4"), print)


@pytest.mark.parametrize(
    "changes",
    (
        {"engine__batch_invariant": True},
        {"engine__replay": "mask"},
        {"kv__storage": "memory"},
        {"model__engram": "host"},
    ),
)
def test_options_for_one_device_are_refused_on_a_mesh(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    option = name.replace("__", ".")
    with pytest.raises(ConfigError, match=f"{option} is {value!r} and sharding cpu8 has 8 devices"):
        load_model(configured(sharding="cpu8", **changes), print)


def test_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ValueError("shapes do not match")

    monkeypatch.setattr(serving.engine.jax_executor, "JaxExecutor", broken)
    with pytest.raises(ValueError, match="shapes do not match") as caught:
        load_model(ServingConfig(), print)
    assert not isinstance(caught.value, ConfigError)


def damaged(folder: Path, name: str, content: bytes | None) -> Path:
    """A copy of the tiny checkpoint with one file replaced, or left out."""
    for file in MODEL_DIR.iterdir():
        if file.name != name:
            shutil.copy(file, folder / file.name)
    if content is not None:
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("is_truncated", [False, True])
def test_missing_and_truncated_files(tmp_path: Path, name: str, is_truncated: bool) -> None:
    whole = (MODEL_DIR / name).read_bytes()
    path = damaged(tmp_path, name, whole[: len(whole) // 2] if is_truncated else None)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")) as caught:
        load_model(configured(model__path=str(path)), lambda line: None)
    assert "\n" not in str(caught.value)


def test_wrong_architecture_is_named(tmp_path: Path) -> None:
    values = json.loads((MODEL_DIR / "config.json").read_text())
    values["model_type"] = "llama"
    path = damaged(tmp_path, "config.json", json.dumps(values).encode())
    with pytest.raises(ConfigError, match="llama"):
        load_model(configured(model__path=str(path)), lambda line: None)


def test_missing_directory_and_unknown_mesh() -> None:
    with pytest.raises(ConfigError, match="/no/where: no such directory"):
        load_model(configured(model__path="/no/where"), lambda line: None)
    with pytest.raises(ConfigError, match="sharding triangle"):
        load_model(configured(sharding="triangle"), lambda line: None)


def test_mesh_larger_than_the_machine(tmp_path: Path) -> None:
    mesh = tmp_path / "wide.toml"
    mesh.write_text("[mesh]\ndata = 4096\n")
    with pytest.raises(ConfigError, match="4096 devices"):
        load_model(configured(sharding=str(mesh)), lambda line: None)


def test_steps_are_written_down_if_that_is_wanted(tmp_path: Path) -> None:
    inner = ScriptedExecutor(lambda position: position)
    assert recorded(inner, "") is inner
    executor = recorded(inner, f"{tmp_path}/steps.jsonl")
    assert isinstance(executor, RecordingExecutor) and (tmp_path / "steps.jsonl").exists()
    with pytest.raises(ConfigError, match=r"engine.step_records: .*: No such file"):
        recorded(inner, f"{tmp_path}/nowhere/steps.jsonl")
