"""Goal: experts on several devices give what they give on one, however uneven the load is. Method:
the same tokens and packed weights on eight CPU devices and on one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.layers.expert_exchange import routed_experts
from deepinfer_jax.parameters import ExpertParameters
from deepinfer_jax.precision import Precision
from pallas_kernels.scaled_array import FP4_ROW32, encode
from sharding.collectives import UNDIVIDED, Group, StepGroups
from sharding.mesh import DeviceMesh, per_device, split_first
from sharding.plan import MeshPlan

pytestmark = pytest.mark.multi_device

NUM_EXPERTS, NUM_CHOSEN, WIDTH, FFN, LIMIT = 16, 3, 64, 32, 4.0
TOKENS = 5
PLAN = MeshPlan({"data": 2, "expert": 4})
ALL = Group.along(PLAN, PLAN.mesh)


@functools.cache
def _experts() -> ExpertParameters:
    rng = np.random.default_rng(5)
    shapes = ((FFN, WIDTH), (FFN, WIDTH), (WIDTH, FFN))
    w1, w3, w2 = (
        encode(jnp.asarray(rng.normal(size=(NUM_EXPERTS, *s)), jnp.float32), FP4_ROW32)
        for s in shapes
    )
    return ExpertParameters(w1=w1, w3=w3, w2=w2)


def _routes(rng: np.random.Generator, case: str) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights [8, T, K] of the tokens of eight devices."""
    index = np.argsort(rng.random((8, TOKENS, NUM_EXPERTS)))[:, :, :NUM_CHOSEN]
    weight = rng.random((8, TOKENS, NUM_CHOSEN)).astype(np.float32) + 0.1
    if case == "one device has all the work":
        # Experts 6 and 7 are one device's; the third choice is another one's.
        index[...] = [7, 6, 12]
    if case == "padding":
        weight[:, 3:] = 0
        weight[5] = 0
    return index.astype(np.int32), weight


@pytest.mark.parametrize("case", ("random", "one device has all the work", "padding"))
@pytest.mark.parametrize("quantise_activations", (False, True))
def test_tokens_of_all_devices(
    rng: np.random.Generator, case: str, quantise_activations: bool
) -> None:
    """The exchange rounds nothing that the experts' own products do not round."""
    precision = Precision(jnp.float32, quantise_activations=quantise_activations)
    index, weight = _routes(rng, case)
    x = rng.normal(size=(8, TOKENS, WIDTH)).astype(np.float32)
    groups = StepGroups(rows=ALL, experts=ALL)
    received = _run(groups, precision, split_first(ALL), x, index, weight)
    _assert_same(received, precision, x, index, weight)


def test_every_group_of_rows_has_all_experts(rng: np.random.Generator) -> None:
    """Experts divided along one axis and repeated along the other."""
    precision = Precision(jnp.float32)
    index, weight = _routes(rng, "random")
    x = rng.normal(size=(8, TOKENS, WIDTH)).astype(np.float32)
    groups = StepGroups(rows=ALL, experts=Group.along(PLAN, ["expert"]))
    received = _run(groups, precision, split_first(ALL), x, index, weight)
    _assert_same(received, precision, x, index, weight)


def test_same_tokens_on_all_devices_are_sent_once(rng: np.random.Generator) -> None:
    """Five tokens do not divide among four devices, and each sends its part of them."""
    precision = Precision(jnp.float32)
    index, weight = _routes(rng, "random")
    x = rng.normal(size=(8, TOKENS, WIDTH)).astype(np.float32)
    line = Group.along(PLAN, ["expert"])
    groups = StepGroups(experts=line, spread=line)
    received = _run(groups, precision, split_first(), x[:1], index[:1], weight[:1])
    _assert_same(received, precision, x[:1], index[:1], weight[:1])


def _run(
    groups: StepGroups,
    precision: Precision,
    spec: jax.sharding.PartitionSpec,
    x: np.ndarray,
    index: np.ndarray,
    weight: np.ndarray,
) -> np.ndarray:
    def one(
        x: jax.Array, index: jax.Array, weight: jax.Array, experts: ExpertParameters
    ) -> jax.Array:
        out = routed_experts(x[0], index[0], weight[0], experts, groups, precision, LIMIT)
        return out[None]

    mesh = DeviceMesh.of(PLAN).mesh
    specs = (spec, spec, spec, split_first(groups.experts))
    run = per_device(one, mesh, specs, spec)
    return np.asarray(jax.jit(run)(x, index, weight, _experts()))


def _assert_same(
    received: np.ndarray, precision: Precision, x: np.ndarray, index: np.ndarray, weight: np.ndarray
) -> None:
    for tokens in range(len(x)):
        one = routed_experts(
            jnp.asarray(x[tokens]),
            jnp.asarray(index[tokens]),
            jnp.asarray(weight[tokens]),
            _experts(),
            UNDIVIDED,
            precision,
            LIMIT,
        )
        scale = float(jnp.abs(one).max()) + 1.0
        np.testing.assert_allclose(received[tokens], one, rtol=0, atol=1e-5 * scale)
