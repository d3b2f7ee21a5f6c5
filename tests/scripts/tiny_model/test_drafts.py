"""The draft module that is trained is the one that is served.

Goal: training proposes what serving proposes.
Method: a prefill step with drafts runs one conversation; what it sampled and drafted is appended,
and the training network, anchored at the last prompt token, has to give the same draft logits and
confidence scores. Anchors have to lie inside answers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import StepShape, pack
from deepinfer_jax.precision import CacheFormat
from deepinfer_jax.steps import SpeculativeResult, run_speculative_step
from scripts.tiny_model.drafts import Anchors, DraftNetwork, choose_anchors
from scripts.tiny_model.network import Network, Rows, Settings
from tests.scripts.tiny_model import small_case


def test_equals_the_served_drafts() -> None:
    prompt = small_case.token_ids()[0]
    model, weights, cache = small_case.served_model(CacheFormat.NOQ)
    shape = StepShape(1, len(prompt), 1, samples_every_token=False)
    buffer = jnp.asarray(pack(small_case.prefill_arrays([prompt]), shape))

    @jax.jit
    def serve(
        weights: Any, buffer: jax.Array, cache: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        seen: dict[str, Any] = {}
        words, _ = run_speculative_step(
            model, shape, weights, buffer, cache, probe=seen.__setitem__
        )
        assert isinstance(words, jax.Array)
        return words, seen["draft_logits"], seen["scores"]

    words, expected, expected_scores = serve(weights, buffer, cache)
    result = SpeculativeResult.unpack(np.asarray(words))
    whole = np.concatenate([prompt, result.tokens[0, :1], result.drafts[0]]).astype(np.int32)
    rows = small_case.packed_rows([whole], (0,))
    network = DraftNetwork(Network(small_case.config(), Settings(jnp.float32, CacheFormat.NOQ)))
    at = Anchors(jnp.array([[len(prompt) - 1]]), jnp.ones((1, 1, 5)))

    @jax.jit
    def train(p: Any, rows: Rows, at: Anchors) -> tuple[jax.Array, jax.Array, jax.Array]:
        _, trace = network.network.hidden(p, rows)
        hidden = network.hidden(p, p.draft, trace.features, rows, at)
        return network.heads(p, p.draft, hidden, rows, at)

    found, scores, true = train(small_case.parameters(), rows, at)
    np.testing.assert_array_equal(np.asarray(true)[0, 0], result.drafts[0])
    np.testing.assert_allclose(np.asarray(found)[0], np.asarray(expected), atol=2e-4)
    np.testing.assert_allclose(np.asarray(scores)[0], np.asarray(expected_scores), atol=2e-4)


def test_anchors_lie_inside_answers() -> None:
    rows = small_case.packed_rows(small_case.token_ids())
    said = np.zeros(rows.said.shape, np.float32)
    said[0, 10:14] = said[0, 30:33] = 1.0
    at = choose_anchors(rows._replace(said=jnp.asarray(said)), 5, 5, jax.random.key(0))
    # After place p come the anchor p + 1 and the drafts from p + 2 on, all of one answer.
    weights = dict(zip(np.asarray(at.place)[0].tolist(), np.asarray(at.weight)[0], strict=True))
    assert set(weights) == {9, 10, 11, 29, 30}
    assert weights[9].tolist() == [1, 1, 1, 0, 0]
    assert weights[11].tolist() == [1, 0, 0, 0, 0]
    assert weights[30].tolist() == [1, 0, 0, 0, 0]
