"""From a configuration to a model that is ready to run: the one way that servers and offline
generation share.

What can fail cheaply is tried first: the mesh plan, the checkpoint's folder and the tokenizer are
looked at before anything is compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serving.cluster import ModelFacts, plan_capacity
from serving.config import ServingConfig
from serving.core.grammar import GrammarCompiler
from serving.engine.engine import Executor
from serving.frontend.text import TextCodec
from sharding.config_file import ConfigError
from sharding.plan import load_plan

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
