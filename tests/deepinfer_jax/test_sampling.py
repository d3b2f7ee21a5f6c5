"""Goal: every token is drawn with its own row's settings at its own position. Method: one step
whose rows differ, against each row by itself.
"""

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import StepShape
from deepinfer_jax.cache import DraftCache
from deepinfer_jax.sampling import accept_equal, sample
from tests.deepinfer_jax.golden_model import batch_arrays, to_batch

SHAPE = StepShape(num_rows=3, num_tokens=6, num_blocks=1, samples_every_token=True)
ROWS = [
    (np.array([1, 2, 3]), 40, 1, [1]),
    (np.array([4, 5]), 7, 2, [2]),
]
ALL = jnp.arange(SHAPE.num_tokens)


def _arrays() -> dict[str, np.ndarray]:
    arrays = batch_arrays(SHAPE, ROWS)
    arrays["temperatures"][:2] = [1.5, 0.0]
    arrays["seed_low"][:2], arrays["seed_high"][:2] = [9, 9], [1, 1]
    return arrays


def test_rows_keep_their_settings(rng: np.random.Generator) -> None:
    logits = jnp.asarray(rng.normal(size=(SHAPE.num_tokens, 50)), jnp.float32)
    tokens = sample(logits, to_batch(SHAPE, _arrays()), ALL)
    np.testing.assert_array_equal(tokens[3:5], np.argmax(logits[3:5], axis=1))
    draws = {int(sample(logits, to_batch(SHAPE, _seeded(seed)), ALL)[0]) for seed in range(20)}
    assert len(draws) > 5, "the first row is drawn, and its seed matters"


def test_a_draw_depends_on_seed_and_position_only(rng: np.random.Generator) -> None:
    row = jnp.asarray(rng.normal(size=50), jnp.float32)
    logits = jnp.broadcast_to(row, (SHAPE.num_tokens, 50))
    together = sample(logits, to_batch(SHAPE, _arrays()), ALL)
    for i in range(3):
        # The token at position 40 + i alone, as the second row of another step.
        arrays = batch_arrays(SHAPE, [(np.array([9]), 0, 3, [3]), (np.array([1]), 40 + i, 1, [1])])
        arrays["temperatures"][:2] = [0.0, 1.5]
        arrays["seed_low"][1], arrays["seed_high"][1] = 9, 1
        alone = sample(logits, to_batch(SHAPE, arrays), ALL)
        assert int(alone[1]) == int(together[i])
    changed = _arrays()
    changed["seed_high"][0] = 2
    others = [int(t) for t in sample(logits, to_batch(SHAPE, changed), ALL)[:3]]
    assert others != [int(t) for t in together[:3]], "the high word of the seed matters"


def test_only_drafts_that_were_sampled_anyway_are_accepted() -> None:
    drafts = np.zeros((4, 5), np.int32)
    drafts[1, :2], drafts[2, :1] = [11, 12], [21]
    cache = DraftCache((), jnp.asarray(drafts), *(jnp.zeros(4) for _ in range(3)))
    batch = to_batch(SHAPE, _arrays())
    # After the tokens of the first row and of the second one; what follows is padding.
    for sampled, accepted, following in (
        ([11, 12, 13, 21, 22, 0], [2, 1], [13, 22]),
        ([11, 99, 13, 21, 22, 0], [1, 1], [99, 22]),
        ([98, 12, 13, 97, 22, 0], [0, 0], [98, 97]),
    ):
        found = accept_equal(jnp.array(sampled, jnp.int32), batch, cache)
        assert [a.tolist()[:2] for a in found] == [accepted, following]
        assert found[0][2] == 0, "padding rows accept nothing"


def _seeded(seed: int) -> dict[str, np.ndarray]:
    arrays = _arrays()
    arrays["seed_low"][0] = seed
    return arrays
