"""Seeded loads of routed experts: how many tokens each got in one step of one layer.

4,096 tokens choose six of 384 experts in each of 40 layers. An expert of popularity p is chosen by
a token with probability min(1, c p), where c makes the probabilities of a layer add up to six, and
its count is binomial. The sets differ in the popularities:

- `zipf_S`: rank to the power -S, ranks a fixed permutation per layer.
- `drift_*`: rank^-0.9; ranks are the order of AR(1) processes with a time constant of 20,000
  (gentle), 2,000 (slow) or 200 (fast) steps.
- `bursts`, `bursts_long`: rank^-0.6, times 8 for groups of eight experts that turn on and off
  together in all layers, two of 48 at a time on average, for 20 or 200 steps on average.

Numbers come from `numpy.random.RandomState`, whose streams never change, so a name gives the same
loads on every machine; `checksum` tells.
"""

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

NUM_EXPERTS = 384
NUM_LAYERS = 40
NUM_TOKENS = 4096
NUM_CHOSEN = 6

NAMES = (
    "zipf_0.6",
    "zipf_0.9",
    "zipf_1.2",
    "drift_slow",
    "drift_fast",
    "bursts",
    "bursts_long",
    "drift_gentle",
)
_FIRST_SEED = 20261130
_COUNT_SEED_OFFSET = 1_000_000

_TIME_CONSTANTS = {"drift_gentle": 20000.0, "drift_slow": 2000.0, "drift_fast": 200.0}
_BURST_LENGTHS = {"bursts": 20.0, "bursts_long": 200.0}
_GROUP_SIZE = 8
_GROUPS_ON = 2.0
_BURST_FACTOR = 8.0

_Popularity = Iterator[np.ndarray]


def loads(name: str, num_steps: int) -> Iterator[np.ndarray]:
    """Yields int64 [layers, experts], once per step.

    Raises:
        ValueError: no such set.
    """
    if name not in NAMES:
        raise ValueError(f"load set {name!r} is unknown; expected one of {', '.join(NAMES)}")
    seed = _FIRST_SEED + NAMES.index(name)
    counts = np.random.RandomState(seed + _COUNT_SEED_OFFSET)
    popularities = _maker(name)(name, np.random.RandomState(seed))
    for _, popularity in zip(range(num_steps), popularities, strict=False):
        yield counts.binomial(NUM_TOKENS, choice_probability(popularity))


def choice_probability(popularity: np.ndarray) -> np.ndarray:
    """Probability [layers, experts] that a token chooses each expert; rows add up to six."""
    chance = popularity / popularity.sum(-1, keepdims=True) * NUM_CHOSEN
    # Whatever exceeds certainty goes to the others in proportion, which may push more over.
    for _ in range(32):
        if chance.max() <= 1.0:
            break
        chance = np.minimum(chance, 1.0)
        is_open = chance < 1.0
        left = NUM_CHOSEN - (~is_open).sum(-1, keepdims=True)
        total = np.maximum(np.where(is_open, chance, 0.0).sum(-1, keepdims=True), 1e-12)
        chance = np.where(is_open, chance * (left / total), 1.0)
    return np.clip(chance, 0.0, 1.0)


def checksum(some: np.ndarray) -> str:
    """Sixteen hexadecimal digits that name an array of counts."""
    return hashlib.sha256(np.ascontiguousarray(some, dtype="<i4").tobytes()).hexdigest()[:16]


def _maker(name: str) -> Callable[[str, np.random.RandomState], _Popularity]:
    return {"zipf": _static, "drift": _drifting, "bursts": _bursting}[name.split("_")[0]]


def _permutations(rng: np.random.RandomState) -> np.ndarray:
    return np.stack([rng.permutation(NUM_EXPERTS) for _ in range(NUM_LAYERS)])


def _static(name: str, rng: np.random.RandomState) -> _Popularity:
    popularity = (_permutations(rng) + 1.0) ** -float(name.split("_")[1])
    while True:
        yield popularity


def _drifting(name: str, rng: np.random.RandomState) -> _Popularity:
    keep = np.exp(-1.0 / _TIME_CONSTANTS[name])
    renew = np.sqrt(1.0 - keep * keep)
    values = rng.standard_normal((NUM_LAYERS, NUM_EXPERTS))
    ranks = np.empty(values.shape)
    while True:
        order = np.argsort(-values, axis=-1, kind="stable")
        np.put_along_axis(ranks, order, np.arange(1.0, NUM_EXPERTS + 1)[None], axis=-1)
        yield ranks**-0.9
        values = keep * values + renew * rng.standard_normal(values.shape)


def _bursting(name: str, rng: np.random.RandomState) -> _Popularity:
    num_groups = NUM_EXPERTS // _GROUP_SIZE
    turn_off = 1.0 / _BURST_LENGTHS[name]
    turn_on = turn_off * _GROUPS_ON / (num_groups - _GROUPS_ON)
    base = (_permutations(rng) + 1.0) ** -0.6
    group = _permutations(rng) % num_groups
    is_on = rng.random_sample(num_groups) < _GROUPS_ON / num_groups
    while True:
        yield base * np.where(is_on[group], _BURST_FACTOR, 1.0)
        draw = rng.random_sample(num_groups)
        is_on = np.where(is_on, draw >= turn_off, draw < turn_on)
