"""What both trainings share: optimiser, loop, checkpoints to resume from, record of the loss."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
import orbax.checkpoint as ocp
from optax import contrib
from tqdm import tqdm

GRADIENT_NORM_MAX = 1.0
CHECKPOINT_EVERY = 250
LOG_EVERY = 10


class State(NamedTuple):
    """What a checkpoint keeps."""

    parameters: Any
    optimiser: Any
    step: jax.Array


Step = Callable[[State, Any], tuple[State, dict[str, jax.Array]]]


def run_steps(
    step: Step,
    state: State,
    batches: Iterable[Any],
    *,
    end: int,
    name: str,
    folder: Path,
    checkpoints: ocp.CheckpointManager,
    bar: tqdm,
) -> State:
    """Steps until number `end`; every tenth is added to `loss.jsonl` as one of stage `name`."""
    done = int(state.step)
    for rows in batches:
        state, named = step(state, jax.tree.map(jax.numpy.asarray, rows))
        done += 1
        bar.update()
        if done % LOG_EVERY == 0:
            values = {key: round(float(value), 4) for key, value in named.items()}
            bar.set_postfix(loss=values["loss"], right=values["right"])
            record(folder / "loss.jsonl", {"step": done, "stage": name, **values})
        if done % CHECKPOINT_EVERY == 0 or done == end:
            save(checkpoints, state)
        if done == end:
            break
    return state


def optimiser(num_steps: int, muon_rate: float, adam_rate: float) -> optax.GradientTransformation:
    """Muon for matrices between hidden states, Adam for everything else; warm-up, then linear
    decay over the last quarter."""

    def schedule(peak: float) -> Callable[[Any], Any]:
        warm, decay = min(100, num_steps // 10), num_steps // 4
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, peak, warm),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, 0.02 * peak, decay),
            ],
            [warm, num_steps - decay],
        )

    return optax.chain(
        optax.clip_by_global_norm(GRADIENT_NORM_MAX),
        contrib.muon(
            schedule(muon_rate),
            adam_learning_rate=schedule(adam_rate),
            weight_decay=0.01,
            muon_weight_dimension_numbers=_matrices,
        ),
        optax.stateless(_faster_tables),
    )


_MATRICES = {"wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "wgate", "wk", "main_proj"}


_ENGRAM = jax.tree_util.GetAttrKey("engram")
_TABLES = {"embed", "markov_embed"}
_TABLE_RATE = 15.0
"""Tables start with entries near 1, which Adam's rate for small weights would hardly move."""


def _faster_tables(updates: Any, parameters: Any) -> Any:
    def of(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
        is_table = path[-1].name in _TABLES and path[-2:-1] != (_ENGRAM,)
        return update * _TABLE_RATE if is_table else update

    return jax.tree_util.tree_map_with_path(of, updates)


def _matrices(parameters: Any) -> Any:
    """Which leaves Muon takes: [..., out, in], leading dimensions apart; None for Adam."""

    def of(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        is_matrix = path[-1].name in _MATRICES and leaf.ndim >= 2
        last = leaf.ndim - 1
        return contrib.MuonDimensionNumbers((last,), (last - 1,)) if is_matrix else None

    return jax.tree_util.tree_map_with_path(of, parameters)


def keeper(folder: Path) -> ocp.CheckpointManager:
    """Keeps the last two checkpoints of a folder."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def save(checkpoints: ocp.CheckpointManager, state: Any) -> None:
    """Saves under the number of the step."""
    leaves = dict(enumerate(jax.tree.leaves(state)))
    named = {str(number): leaf for number, leaf in leaves.items()}
    checkpoints.save(int(state.step), args=ocp.args.StandardSave(named))
    checkpoints.wait_until_finished()


def restored(checkpoints: ocp.CheckpointManager, state: Any) -> Any:
    """The last saved state of the same form; `state` itself if none was saved."""
    last = checkpoints.latest_step()
    if last is None:
        return state
    leaves, tree = jax.tree.flatten(state)
    named = {str(number): leaf for number, leaf in enumerate(leaves)}
    found = checkpoints.restore(last, args=ocp.args.StandardRestore(named))
    return jax.tree.unflatten(tree, [found[str(number)] for number in range(len(leaves))])


def record(path: Path, values: dict[str, Any]) -> None:
    """Adds a line to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
