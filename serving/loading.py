"""From a configuration to a model that is ready to run: the one way that servers and offline
generation share.

What can fail cheaply is tried first: the mesh plan, the checkpoint's folder and the tokenizer are
looked at before anything is compiled.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serving.cluster import Capacity, ModelFacts, plan_capacity
from serving.config import ServingConfig
from serving.core.buckets import Bucket, StepKind
from serving.core.grammar import GrammarCompiler
from serving.engine.engine import Executor
from serving.engine.step_costs import cost_file, read_costs, write_costs
from serving.frontend.text import TextCodec
from serving.transport.driver import SystemClock
from sharding.config_file import ConfigError
from sharding.plan import load_plan

if TYPE_CHECKING:
    from serving.engine.jax_executor import JaxExecutor

Report = Callable[[str], None]
"""Takes one line of progress."""

_OUR_PACKAGES = ("deepinfer_jax", "sharding", "serving")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A compiled model and what serving needs to know of it.

    `grammars` is None for a model that has no token to end a text with.
    """

    executor: Executor
    facts: ModelFacts
    codec: TextCodec
    grammars: GrammarCompiler | None = None


def load_model(config: ServingConfig, report: Report) -> LoadedModel:
    """Loads the checkpoint and compiles every shape of the configuration.

    Raises:
        ConfigError: the checkpoint, the mesh or a size is not usable; one line, for a person.
    """
    directory = config.model.directory
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; expected a checkpoint directory")
    if config.engine.has_drafts and config.model.engram == "host":
        raise ConfigError(
            "engine.has_drafts is true and model.engram is 'host'; expected 'device', because rows "
            "of Engram tables cannot be sent for drafts that the host does not know"
        )
    mesh_plan = load_plan(config.sharding)
    capacity = plan_capacity(config.engine)
    codec = TextCodec.load(directory)
    # Imported here, because it takes a second and help texts and early errors need none of it.
    from serving.engine.jax_executor import JaxExecutor

    try:
        executor = JaxExecutor(
            directory,
            config.model.cache_format,
            capacity.buckets,
            capacity.num_blocks,
            capacity.num_slots + capacity.num_snapshots,
            mesh_plan,
            report=report,
            engram=config.model.engram,
            has_drafts=config.engine.has_drafts,
        )
    except (ValueError, OSError) as error:
        # Errors that our own packages define are about the input; any other is a defect, whose
        # traceback is worth more than a line.
        if isinstance(error, OSError) or type(error).__module__.startswith(_OUR_PACKAGES):
            raise ConfigError(" ".join(str(error).split())) from error
        raise
    model_config = executor.model_config
    facts = ModelFacts(
        vocab_size=model_config.vocab_size,
        max_position_embeddings=model_config.max_position_embeddings,
        eos_token_id=model_config.eos_token_id,
        images=executor.image_geometry,
        num_drafts=executor.num_drafts,
        step_ms=_step_costs(executor, capacity, report) if executor.num_drafts else {},
    )
    if facts.images is not None:
        codec = codec.with_image_token(facts.images.token_id)
    return LoadedModel(executor, facts, codec, _grammars_of(directory, facts))


def _grammars_of(directory: Path, facts: ModelFacts) -> GrammarCompiler | None:
    if facts.eos_token_id is None:
        return None
    path = directory / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        return GrammarCompiler(text, facts.vocab_size, facts.eos_token_id)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _step_costs(
    executor: "JaxExecutor", capacity: Capacity, report: Report
) -> Mapping[Bucket, float]:
    """Times of decode steps: as measured at an earlier start, or else measured now."""
    buckets = set(capacity.buckets.of(StepKind.DECODE))
    directory = executor.cache_directory
    path = None if directory is None else cost_file(directory, executor.identity)
    known = None if path is None else read_costs(path, buckets)
    if known is not None:
        return known
    report("measuring decode steps")
    measured = executor.decode_step_ms(SystemClock().now_ns)
    if path is not None:
        # Without the file they are measured again next time.
        with contextlib.suppress(OSError):
            write_costs(path, measured)
    return measured
