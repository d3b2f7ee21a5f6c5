"""The training loop of the draft module, over a main model that stays as it will be served."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameters import DraftParameters, Parameters
from scripts.tiny_model.drafts import DraftNetwork, draft_loss
from scripts.tiny_model.loop import State, keeper, optimiser, restored, run_steps
from scripts.tiny_model.network import Network, Settings
from scripts.tiny_model.rows import RowSource
from scripts.tiny_model.weights import as_stored, initial_parameters, split_draft, storage_of

NUM_STEPS, BATCH_SIZE, NUM_ANCHORS = 600, 4, 24
PEAK_RATE_MUON, PEAK_RATE_ADAM = 0.02, 3e-3


def draft_step(
    network: DraftNetwork,
    storage: Any,
    update: optax.GradientTransformation,
    main: Parameters,
    state: State,
    rows: Any,
) -> tuple[State, dict[str, jax.Array]]:
    """One optimiser step of the draft module."""

    def loss(draft: DraftParameters) -> tuple[jax.Array, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(0), state.step)
        return draft_loss(network, main, NUM_ANCHORS, as_stored(draft, storage), rows, key)

    (_, named), gradients = jax.value_and_grad(loss, has_aux=True)(state.parameters)
    updates, optimiser_state = update.update(gradients, state.optimiser, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)
    return State(parameters, optimiser_state, state.step + 1), named


@dataclass(frozen=True)
class DraftTraining:
    """A run in a folder; `rows` gives the text, `main` is the trained text part."""

    config: ModelConfig
    main: Parameters
    rows: RowSource
    folder: Path
    seed: int
    num_steps: int = NUM_STEPS

    def run(self) -> DraftParameters:
        """Trains to the end, from the last checkpoint if there is one."""
        update = optimiser(self.num_steps, PEAK_RATE_MUON, PEAK_RATE_ADAM)
        text_storage, draft_storage = split_draft(storage_of(self.config))
        _, draft = split_draft(initial_parameters(self.config, self.seed))
        state = State(draft, update.init(draft), jnp.zeros((), jnp.int32))
        main = as_stored(self.main, text_storage)
        network = DraftNetwork(Network(self.config, Settings()))
        step = jax.jit(
            functools.partial(draft_step, network, draft_storage, update), donate_argnums=1
        )
        with (
            keeper(self.folder / "draft") as checkpoints,
            tqdm(total=self.num_steps, unit="step", desc="draft") as bar,
        ):
            state = restored(checkpoints, state)
            bar.update(int(state.step))
            if int(state.step) < self.num_steps:
                state = run_steps(
                    functools.partial(step, main),
                    state,
                    self._batches(int(state.step)),
                    end=self.num_steps,
                    name="draft",
                    folder=self.folder,
                    checkpoints=checkpoints,
                    bar=bar,
                )
        return state.parameters

    def _batches(self, first_step: int) -> Iterator[Any]:
        return self.rows.batches(BATCH_SIZE, first_step)
