"""The training loop of the main model: stages, optimiser, checkpoints, and a record of the loss.

Everything follows from the seed: initial weights, text and order. A run that was stopped goes on
from its last checkpoint with the row it would have read next.
"""

# optax leaves the trees it updates untyped.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.parameters import Parameters
from deepinfer_jax.precision import CacheFormat
from scripts.tiny_model.loop import State, keeper, optimiser, restored, run_steps
from scripts.tiny_model.network import Network, Rows, Settings
from scripts.tiny_model.products import cross_entropy
from scripts.tiny_model.prompts import Codec
from scripts.tiny_model.rows import RowSource
from scripts.tiny_model.tasks import DRILLS, FIRST_DRILLS, LAST_DRILLS
from scripts.tiny_model.weights import as_stored, initial_parameters, split_draft, storage_of

SAID_SHARE_MAX = 0.625
"""Share of a batch's tokens for which logits are made; more are left out of the loss."""

INDEX_LOSS_WEIGHT = 1.0
BALANCE_LOSS_WEIGHT = 0.003
BIAS_STEP = 0.002
"""How far a router bias moves per step towards even use of the experts."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of training with one shape.

    Attributes:
        num_steps: optimiser steps.
        length, batch_size: T and B.
        pairs_max: most pairs in the lists of ordinary rows.
        words_max: most words to copy.
        long_share: share of rows with a list that fills the row.
        drill_share: share of the other conversations that practise one task.
        drills: those tasks.
        found_weight: loss weight of the words that answers take from a list.
        serves: rounds weights and cache and selects entries, as serving does.
    """

    num_steps: int
    length: int
    batch_size: int
    pairs_max: int
    words_max: int
    long_share: float
    drill_share: float
    drills: Mapping[str, float]
    found_weight: float
    serves: bool

    def network(self, config: ModelConfig) -> Network:
        """How this stage computes. It selects fewer entries than the served model, so that what
        matters most learns to come first."""
        cache_format = CacheFormat.KVQ if self.serves else CacheFormat.NOQ
        tight = dataclasses.replace(
            config,
            index_topk=config.index_topk // 2,
            candidate_topk_blocks=config.candidate_topk_blocks * 2 // 3,
        )
        return Network(tight, Settings(cache_format=cache_format, selects=self.serves))


STAGES = (
    Stage(800, 128, 16, 8, 12, 0.0, 1.0, FIRST_DRILLS, 1.0, False),
    Stage(900, 128, 16, 12, 12, 0.0, 0.8, DRILLS, 3.0, False),
    Stage(600, 256, 8, 40, 48, 0.4, 0.7, DRILLS, 3.0, False),
    Stage(900, 640, 4, 40, 48, 0.5, 0.3, LAST_DRILLS, 5.0, True),
)
PEAK_RATE_MUON, PEAK_RATE_ADAM = 0.02, 3e-3


def loss(network: Network, storage: Any, parameters: Any, rows: Rows) -> tuple[jax.Array, Any]:
    """Loss of a batch, and ({name: value}, [L, E] loads)."""
    if network.settings.selects:
        parameters = as_stored(parameters, storage)
    hidden, trace = network.hidden(parameters, rows)
    weight = rows.said[:, 1:].reshape(-1)
    size = int(weight.shape[0] * SAID_SHARE_MAX)
    where = jnp.nonzero(weight > 0, size=size, fill_value=0)[0]
    logits = network.logits(parameters, hidden[:, :-1].reshape(-1, hidden.shape[-1])[where])
    targets = rows.token_ids[:, 1:].reshape(-1)[where]
    weight = weight[where] * (jnp.arange(size) < jnp.sum(weight > 0))
    total = jnp.sum(weight) + 1e-6
    text = jnp.sum(cross_entropy(logits, targets) * weight) / total
    right = jnp.sum((jnp.argmax(logits, axis=-1) == targets) * weight) / total
    whole = text + INDEX_LOSS_WEIGHT * trace.index_loss + BALANCE_LOSS_WEIGHT * trace.balance_loss
    named = {
        "loss": text,
        "right": right,
        "index_loss": trace.index_loss,
        "kept": trace.recall,
        "balance": trace.balance_loss,
    }
    return whole, (named, trace.loads)


def train_step(
    network: Network, storage: Any, update: optax.GradientTransformation, state: State, rows: Rows
) -> tuple[State, dict[str, jax.Array]]:
    """One optimiser step."""
    gradient_of = jax.value_and_grad(functools.partial(loss, network, storage), has_aux=True)
    (_, (named, loads)), gradients = gradient_of(state.parameters, rows)
    updates, optimiser_state = update.update(gradients, state.optimiser, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)
    layers = []
    for number, layer in enumerate(parameters.layers):
        # The biases steer only the choice of experts and have no gradient.
        step = BIAS_STEP * jnp.sign(jnp.mean(loads[number]) - loads[number])
        bias = state.parameters.layers[number].ffn.bias + step
        ffn = dataclasses.replace(layer.ffn, bias=bias, bias_vl=bias)
        layers.append(dataclasses.replace(layer, ffn=ffn))
    parameters = dataclasses.replace(parameters, layers=tuple(layers))
    named["gradient"] = optax.global_norm(gradients)
    return State(parameters, optimiser_state, state.step + 1), named


@dataclass(frozen=True)
class Training:
    """A run in a folder.

    Attributes:
        config, tables, codec: of the model.
        folder: takes checkpoints and `loss.jsonl`.
        stages: what to do.
        seed: of weights and text.
    """

    config: ModelConfig
    tables: EngramTables
    codec: Codec
    folder: Path
    stages: tuple[Stage, ...]
    seed: int

    def run(self) -> Parameters:
        """Trains to the end, from the last checkpoint if there is one; the text part."""
        total = sum(stage.num_steps for stage in self.stages)
        update = optimiser(total, PEAK_RATE_MUON, PEAK_RATE_ADAM)
        storage, _ = split_draft(storage_of(self.config))
        parameters, _ = split_draft(initial_parameters(self.config, self.seed))
        state = State(parameters, update.init(parameters), jnp.zeros((), jnp.int32))
        with keeper(self.folder / "main") as checkpoints:
            state = restored(checkpoints, state)
            begin = 0
            with tqdm(total=total, initial=int(state.step), unit="step", desc="main") as bar:
                for number, stage in enumerate(self.stages):
                    end = begin + stage.num_steps
                    if int(state.step) < end:
                        network = stage.network(self.config)
                        step = functools.partial(train_step, network, storage, update)
                        source = self.rows(number)
                        state = run_steps(
                            jax.jit(step, donate_argnums=0),
                            state,
                            source.batches(stage.batch_size, int(state.step) - begin),
                            end=end,
                            name=f"{stage.length} tokens",
                            folder=self.folder,
                            checkpoints=checkpoints,
                            bar=bar,
                        )
                    begin = end
        return state.parameters

    def rows(self, number: int) -> RowSource:
        """The rows of a stage."""
        stage = self.stages[number]
        seed = self.seed * 100 + number
        return RowSource(
            self.codec,
            self.tables,
            stage.length,
            seed,
            stage.pairs_max,
            stage.words_max,
            stage.long_share,
            stage.drill_share,
            stage.drills,
            stage.found_weight,
        )
