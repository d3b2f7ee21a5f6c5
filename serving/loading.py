"""From a configuration to a model that is ready to run: the one way that servers and offline
generation share.

What can fail cheaply is tried first: the mesh plan, the checkpoint's folder and the tokenizer are
looked at before anything is compiled.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.cluster import Capacity, ModelFacts, VisionFacts, plan_capacity
from serving.config import ServingConfig
from serving.core.blocks import BLOCK_SIZE
from serving.core.buckets import TILE_TOKENS, Bucket, CompiledProgram, StepKind
from serving.core.cost import PrefillCost, fit_prefill_cost
from serving.core.grammar import GrammarCompiler
from serving.cost_file import read_cost_file
from serving.engine import step_costs, step_times
from serving.engine.engine import Executor
from serving.engine.step_records import RecordingExecutor
from serving.frontend.text import TextCodec
from serving.kv.fingerprint import kv_fingerprint, model_revision
from serving.kv.store import PayloadForm, layout_id
from serving.transport.driver import SystemClock
from sharding.config_file import ConfigError
from sharding.plan import MeshPlan, load_plan

if TYPE_CHECKING:
    from serving.engine.image_executor import ImageExecutor
    from serving.engine.jax_executor import JaxExecutor

Report = Callable[[str], None]
"""Takes one line of progress."""

_OUR_PACKAGES = ("deepinfer_jax", "sharding", "serving")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A compiled model and what serving needs to know of it.

    `grammars` is None for a model that has no token to end a text with. `program_texts` gives its
    compiled steps in the notation of XLA; `programs` is all that was compiled.
    """

    executor: Executor
    facts: ModelFacts
    codec: TextCodec
    grammars: GrammarCompiler | None = None
    program_texts: Callable[[], Iterable[str]] = tuple
    programs: tuple[CompiledProgram, ...] = ()


def load_model(config: ServingConfig, report: Report) -> LoadedModel:
    """Loads the checkpoint and compiles every shape of the configuration.

    Raises:
        ConfigError: the checkpoint, the mesh or a size is not usable; one line, for a person.
    """
    directory = config.model.directory
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; expected a checkpoint directory")
    mesh_plan = load_plan(config.sharding)
    _check_runs(config, mesh_plan)
    engram = _engram_of(config, mesh_plan)
    capacity = plan_capacity(config.engine)
    codec = TextCodec.load(directory)
    # Imported here, because it takes a second and help texts and early errors need none of it.
    from serving.engine.compile_log import CompileLog

    executor_type = _executor_type(mesh_plan)
    log = CompileLog(SystemClock().now_ns)
    with _as_config_errors(), log.listening():
        executor = executor_type(
            directory,
            config.model.cache_format,
            capacity.buckets,
            capacity.num_blocks,
            capacity.num_slots + capacity.num_snapshots,
            mesh_plan,
            report=report,
            engram=engram,
            has_drafts=config.engine.has_drafts,
            tile_tokens=TILE_TOKENS if config.engine.batch_invariant else 0,
            replay=capacity.replay,
            watch=log.watch,
            kv_clock=SystemClock().now_ns if config.kv.is_on or config.cluster.is_on else None,
        )
    report(_compiled_line(log.programs))
    model_config = executor.model_config
    facts = ModelFacts(
        vocab_size=model_config.vocab_size,
        max_position_embeddings=model_config.max_position_embeddings,
        eos_token_id=model_config.eos_token_id,
        images=executor.image_geometry,
        num_drafts=executor.num_drafts,
        num_ranks=executor.num_ranks,
        step_ms=_decode_costs(executor, capacity, report) if executor.num_drafts else {},
        prefill_cost=_prefill_cost(config, executor, capacity, report),
        num_replayed=0 if capacity.replay is None else executor.model.num_replayed,
        **_kv_facts(config, executor, report),
    )
    if facts.images is not None:
        codec = codec.with_image_token(facts.images.token_id)
    return LoadedModel(
        executor,
        facts,
        codec,
        _grammars_of(directory, facts),
        executor.program_texts,
        log.programs,
    )


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A compiled image encoder and what a vision worker needs to know of it."""

    executor: "ImageExecutor"
    facts: VisionFacts


def load_encoder(config: ServingConfig, report: Report) -> LoadedEncoder:
    """Loads the image encoder of the checkpoint, and nothing else, onto one device.

    Raises:
        ConfigError: the checkpoint is not usable, or the model takes no images.
    """
    directory = config.model.directory
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; expected a checkpoint directory")
    from serving.engine.image_executor import ImageExecutor

    with _as_config_errors():
        executor = ImageExecutor(directory, load_plan("single"), report)
    facts = VisionFacts(
        images=executor.image_geometry,
        features=kv_fingerprint(_revision_of(config, report), executor.feature_form),
        feature_bytes=executor.feature_bytes,
        tokens_per_s=executor.tokens_per_s(SystemClock().now_ns),
    )
    return LoadedEncoder(executor, facts)


@contextlib.contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        # Errors that our own packages define are about the input; any other is a defect, whose
        # traceback is worth more than a line.
        if isinstance(error, OSError) or type(error).__module__.startswith(_OUR_PACKAGES):
            raise ConfigError(" ".join(str(error).split())) from error
        raise


def _executor_type(plan: MeshPlan) -> "type[JaxExecutor]":
    from serving.engine import jax_executor, mesh_executor

    return jax_executor.JaxExecutor if plan.num_devices == 1 else mesh_executor.MeshExecutor


def _compiled_line(programs: tuple[CompiledProgram, ...]) -> str:
    seconds = sum(program.seconds for program in programs)
    num_hits = sum(program.is_from_cache for program in programs)
    return (
        f"compiled {len(programs)} programs in {seconds:.1f} s of work, "
        f"{num_hits} of them from the cache"
    )


def _engram_of(config: ServingConfig, plan: MeshPlan) -> str:
    """Where Engram tables lie: in host memory if the model's options or the mesh say so."""
    engram = "host" if plan.engram == "host" else config.model.engram
    if config.engine.has_drafts and engram == "host":
        key = "model.engram" if config.model.engram == "host" else f"engram of {config.sharding}"
        raise ConfigError(
            f"engine.has_drafts is true and {key} is 'host'; expected 'device', because rows "
            "of Engram tables cannot be sent for drafts that the host does not know"
        )
    return engram


def _check_runs(config: ServingConfig, plan: MeshPlan) -> None:
    """Refuses settings of a mesh that `plan --sharding` knows and steps do not have, and options
    that steps on one device alone have.
    """
    _check_handed_over(config)
    sharding = config.sharding
    for name, value, expected in (
        ("redundant_experts", plan.redundant_experts, 0),
        ("micro_batches", plan.micro_batches, 1),
        ("the number of parts of tokens", plan.num_parts("tokens"), 1),
    ):
        if value != expected:
            raise ConfigError(
                f"sharding {sharding}: {name} is {value}, which can be planned with and not run "
                f"yet; expected {expected}"
            )
    if plan.num_devices == 1:
        return
    for name, value, expected in (
        ("engine.batch_invariant", config.engine.batch_invariant, False),
        ("engine.replay", config.engine.replay, "off"),
        ("kv.storage", config.kv.storage, "off"),
        ("model.engram", "host" if plan.engram == "host" else config.model.engram, "device"),
    ):
        if value != expected:
            raise ConfigError(
                f"{name} is {value!r} and sharding {sharding} has {plan.num_devices} devices; "
                f"expected {expected!r}, or a mesh of one device"
            )


def _check_handed_over(config: ServingConfig) -> None:
    """Raise `ConfigError` if what is computed cannot be handed over."""
    if config.cluster.is_on and config.engine.replay != "off":
        raise ConfigError(
            f"cluster.nodes has {len(config.cluster.nodes)} workers and engine.replay is "
            f"{config.engine.replay!r}; expected 'off', because what replay computes is not handed "
            "over"
        )


def _kv_facts(config: ServingConfig, executor: "JaxExecutor", report: Report) -> dict[str, Any]:
    """The fields of `ModelFacts` that are about blocks outside the device."""
    if executor.kv_moves is None:
        return {}
    form, revision = executor.kv_moves.form, _revision_of(config, report)
    fingerprint = kv_fingerprint(revision, form.description)
    payloads = PayloadForm(layout_id(fingerprint), form.group_bytes, form.state_bytes)
    features = executor.feature_form and kv_fingerprint(revision, executor.feature_form)
    return {"kv_form": payloads, "kv_fingerprint": fingerprint, "features": features or b""}


def _revision_of(config: ServingConfig, report: Report) -> str:
    """What the checkpoint is known by: as it is named, or as its files say."""
    if config.kv.model_revision:
        return config.kv.model_revision
    report("reading the weights for their revision (kv.model_revision spares that)")
    try:
        return model_revision(config.model.directory)
    except OSError as error:
        raise ConfigError(f"{config.model.directory}: {error.strerror or error}") from None


def _grammars_of(directory: Path, facts: ModelFacts) -> GrammarCompiler | None:
    if facts.eos_token_id is None:
        return None
    path = directory / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        return GrammarCompiler(text, facts.vocab_size, facts.eos_token_id)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def recorded(executor: Executor, path: str) -> Executor:
    """An executor whose steps are written down in a file; the same without one.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not path:
        return executor
    try:
        # Several processes may add to it: a line is one write.
        file = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"engine.step_records: {path}: {error.strerror}") from None
    return RecordingExecutor(executor, partial(os.write, file))


def _decode_costs(
    executor: "JaxExecutor", capacity: Capacity, report: Report
) -> Mapping[Bucket, float]:
    """Times of decode steps: as measured at an earlier start, or else measured now."""
    buckets = capacity.buckets.of(StepKind.DECODE)
    path = _cost_file(executor, "step-costs")
    known = None if path is None else step_costs.read_costs(path, set(buckets))
    if known is not None:
        return known
    report("measuring decode steps")
    measured = step_times.decode_step_ms(executor, buckets, SystemClock().now_ns)
    if path is not None:
        # Without the file they are measured again next time.
        with contextlib.suppress(OSError):
            step_costs.write_costs(path, measured)
    return measured


def _prefill_cost(
    config: ServingConfig, executor: "JaxExecutor", capacity: Capacity, report: Report
) -> PrefillCost | None:
    """What prefill steps cost: as a file says, or by times measured at an earlier start, or now.

    None if nobody says and nothing goes by it.
    """
    if config.engine.cost_file:
        return read_cost_file(Path(config.engine.cost_file).expanduser()).prefill_cost
    if not config.engine.prefill_time_budget_ms and not config.cluster.local_prefill_ms:
        return None
    buckets = capacity.buckets.of(StepKind.PREFILL)
    places = step_times.prefill_places(buckets, BLOCK_SIZE)
    path = _cost_file(executor, "prefill-costs")
    counts = [counts for *_, counts in places]
    samples = None if path is None else step_costs.read_samples(path, counts)
    if samples is None:
        report("measuring prefill steps")
        now_ns = SystemClock().now_ns
        samples = step_times.prefill_samples(executor, buckets, BLOCK_SIZE, now_ns)
        if path is not None:
            with contextlib.suppress(OSError):
                step_costs.write_samples(path, samples)
    cost = fit_prefill_cost(samples)
    report(
        f"prefill steps: {cost.base_ms:.3g} ms, {1e3 * cost.token_ms:.3g} us per token, "
        f"{1e6 * cost.pair_ms:.3g} ns per pair"
    )
    return cost


def _cost_file(executor: "JaxExecutor", name: str) -> Path | None:
    directory = executor.cache_directory
    return None if directory is None else step_costs.cost_file(directory, executor.identity, name)
