"""Goal: host memory gives every step the rows that the device would have read itself.

Method: sequences cut into steps in many ways, against a walk backwards over each whole sequence and
a table that says in every row which row it is. That both placements give the same tokens is
tested with the executor.
"""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import ROLLBACK_MAX
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_host import HostEngram, detach_tables
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.layers.engram import unpack_rows
from pallas_kernels.scaled_array import FP8_ROW32, ScaledArray, decode, encode
from tests.deepinfer_jax import golden_model

CONFIG = ModelConfig.tiny()
CLASSES = np.minimum(np.arange(CONFIG.vocab_size), CONFIG.engram_compressed_vocab_size - 1)
TABLES = EngramTables.of(CONFIG, CLASSES[::-1].astype(np.int32))
ORDER = CONFIG.engram_max_ngram_size
RING = ORDER - 1 + ROLLBACK_MAX
IMAGE = CONFIG.image_token_id


def table(height: int, salt: int) -> ScaledArray:
    """Codes of a row hold its number in base 64; scales hold the salt."""
    codes = np.zeros((height, CONFIG.engram_head_dim), np.uint8)
    codes[:, 0], codes[:, 1] = np.arange(height) // 64, np.arange(height) % 64
    scale = np.full((height, CONFIG.engram_head_dim // 32), salt, np.uint8)
    scales = scale.view(jnp.dtype(FP8_ROW32.scale_dtype))
    return ScaledArray(codes.view(jnp.dtype(FP8_ROW32.code_dtype)), scales, FP8_ROW32)


@functools.cache
def mapped() -> list[ScaledArray]:
    """One such table per Engram layer."""
    return [table(height, i + 1) for i, height in enumerate(CONFIG.engram_num_embeddings)]


def host(num_slots: int = 5) -> HostEngram:
    """A host memory whose rings hold no token yet."""
    return HostEngram(CONFIG, TABLES, mapped(), (num_slots, RING))


def expected_rows(ids: np.ndarray, position: int) -> np.ndarray:
    """[L, K] rows of one token, by walking back over its whole sequence."""
    classes = []
    for at in range(position, position - ORDER, -1):
        if at < 0 or ids[at] in (IMAGE, -1):
            classes += [TABLES.pad_class] * (ORDER - len(classes))
            break
        classes.append(int(TABLES.token_classes[ids[at]]))
    return TABLES.rows(np.array(classes))


def step_of(
    memory: HostEngram, rows: list[tuple[np.ndarray, int, int, int]], num_tokens: int = 24
) -> np.ndarray:
    """What a step fetches for rows of (ids of the sequence, start, count, slot), padded."""
    token_ids = np.zeros(num_tokens, np.int32)
    used = np.concatenate([ids[start : start + count] for ids, start, count, _ in rows])
    token_ids[: len(used)] = used
    columns = np.array([(start, count, slot) for _, start, count, slot in rows] + [(0, 0, 0)])
    starts, counts, slots = columns.astype(np.int32).T
    fetched = memory.fetch(token_ids, starts, counts, slots)
    assert fetched.dtype == np.uint8 and fetched.shape == (num_tokens, *memory.row_shape)
    assert not fetched[len(used) :].any()
    return fetched[: len(used)]


def numbers(fetched: np.ndarray) -> np.ndarray:
    """[T, L, K] row numbers that fetched bytes stand for."""
    salt = np.arange(1, fetched.shape[1] + 1)[None, :, None]
    assert (fetched[..., -CONFIG.engram_head_dim // 32 :] == salt[..., None]).all()
    return fetched[..., 0].astype(int) * 64 + fetched[..., 1]


@pytest.mark.parametrize(
    "cuts", [[(9, 3), (11, 0)], [(1, 1), (2, 1), (1, 1), (6, 6)], [(1, 0)] * 7 + [(0, 12), (12, 0)]]
)
def test_rows_of_every_cut(cuts: list[tuple[int, int]], rng: np.random.Generator) -> None:
    sequences = {2: rng.integers(0, 300, 20), 3: rng.integers(0, 300, 20)}
    sequences[3][[2, 7]] = IMAGE
    sequences[3][3] = -1
    memory = host()
    # What another sequence left behind in a slot must not matter.
    step_of(memory, [(rng.integers(0, 300, 20), 0, 20, 3)])
    done = {2: 0, 3: 0}
    for cut in cuts:
        rows, expected = [], []
        for slot, count in zip((2, 3), cut, strict=True):
            rows.append((sequences[slot], done[slot], count, slot))
            places = range(done[slot], done[slot] + count)
            expected += [expected_rows(sequences[slot], position) for position in places]
            done[slot] += count
        np.testing.assert_array_equal(numbers(step_of(memory, rows)), expected)


def test_rejected_tokens_are_forgotten(rng: np.random.Generator) -> None:
    """Six rows run, two are kept, and the next step starts behind those."""
    ids, memory = rng.integers(0, 300, 30), host()
    step_of(memory, [(ids, 0, 12, 1)])
    refused = ids.copy()
    refused[14:18] = (ids[14:18] + 1) % 300
    step_of(memory, [(refused, 12, 6, 1)])
    got = numbers(step_of(memory, [(ids, 14, 3, 1)]))
    np.testing.assert_array_equal(got, [expected_rows(ids, p) for p in (14, 15, 16)])


def test_a_copied_slot_goes_on_like_its_source(rng: np.random.Generator) -> None:
    ids, memory = rng.integers(0, 300, 30), host()
    step_of(memory, [(ids, 0, 10, 1)])
    memory.copy_slots(np.array([[1, 4], [0, 0]], np.int32))
    step_of(memory, [(ids[::-1].copy(), 0, 10, 1)])
    got = numbers(step_of(memory, [(ids, 10, 2, 4)]))
    np.testing.assert_array_equal(got, [expected_rows(ids, p) for p in (10, 11)])
    memory.copy_slots(np.zeros((0, 2), np.int32))


def test_a_slot_goes_on_from_classes_that_are_put_there(rng: np.random.Generator) -> None:
    ids = rng.integers(0, 300, 12)
    memory, other = host(), host()
    step_of(memory, [(ids, 0, 10, 1)])
    other.set_classes(np.array([4], np.int32), memory._rings[[1]])
    got = numbers(step_of(other, [(ids, 10, 2, 4)]))
    np.testing.assert_array_equal(got, [expected_rows(ids, p) for p in (10, 11)])


def test_a_large_step_is_read_by_several_threads(rng: np.random.Generator) -> None:
    ids = rng.integers(0, 300, 3000)
    got = numbers(step_of(host(), [(ids, 0, 3000, 1)], num_tokens=3000))
    some = rng.integers(0, 3000, 50)
    np.testing.assert_array_equal(got[some], [expected_rows(ids, int(p)) for p in some])
    assert (got < np.array(CONFIG.engram_num_embeddings)[:, None]).all()


def test_an_error_of_a_thread_is_not_lost() -> None:
    memory = host()
    memory._leaves = [(codes[:100], scale[:100]) for codes, scale in memory._leaves]
    with pytest.raises(IndexError):
        step_of(memory, [(np.arange(300), 0, 300, 1)], num_tokens=3000)


def test_bytes_are_the_values_of_the_table(rng: np.random.Generator) -> None:
    width = CONFIG.engram_head_dim
    heights = CONFIG.engram_num_embeddings
    tables = [encode(jnp.asarray(rng.normal(size=(h, width))), FP8_ROW32) for h in heights]
    memory = HostEngram(CONFIG, TABLES, jax.tree.map(np.asarray, tables), (3, RING))
    ids = rng.integers(0, 300, 6)
    fetched = step_of(memory, [(ids, 0, 6, 1)])
    for i, whole in enumerate(tables):
        rows = np.array([expected_rows(ids, p)[i] for p in range(6)])
        read = unpack_rows(jnp.asarray(fetched[:, i]), width)
        np.testing.assert_array_equal(decode(read), decode(whole)[rows])


def test_the_system_reads_nothing_ahead_in_a_mapped_table(tmp_path: Path) -> None:
    paths = [tmp_path / f"table{i}" for i in range(2)]
    tables = []
    for path, whole in zip(paths, mapped(), strict=True):
        codes, scale = whole.codes.tobytes(), whole.scale.tobytes()
        # The table does not begin at a page, and something else comes first.
        path.write_bytes(bytes(9999) + codes + scale)
        content = np.asarray(np.memmap(path, np.uint8, mode="r"))[9999:]
        parts = content[: len(codes)], content[len(codes) :]
        tables.append(
            jax.tree.map(lambda a, b: b.view(a.dtype).reshape(a.shape), whole, _like(whole, parts))
        )
    memory = HostEngram(CONFIG, TABLES, tables, (3, RING))
    ids = np.arange(5, 11)
    expected = [expected_rows(ids, p) for p in range(6)]
    np.testing.assert_array_equal(numbers(step_of(memory, [(ids, 0, 6, 1)])), expected)
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("only Linux shows the advice given for a mapping")
    for path in paths:
        after = smaps.read_text().split(str(path))[1:]
        flags = [re.findall(r"VmFlags: (.*)", mapping)[0].split() for mapping in after]
        # The page before the table is a mapping of its own.
        assert ["rr" in f for f in flags] == [False, True]


def _like(whole: ScaledArray, parts: tuple[np.ndarray, np.ndarray]) -> ScaledArray:
    return ScaledArray(*parts, whole.format)


def test_tables_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have \[864\] rows; expected \[864, 1054\]"):
        HostEngram(CONFIG, TABLES, mapped()[:1], (3, RING))


def test_detached_tables_are_all_that_is_missing() -> None:
    _, weights = golden_model.load("kvq")
    parameters, tables = detach_tables(weights.parameters)
    assert [t.shape[0] for t in tables] == list(CONFIG.engram_num_embeddings)
    held, left = (
        sum(x.nbytes for x in jax.tree.leaves(p)) for p in (weights.parameters, parameters)
    )
    assert held - left == sum(t.nbytes for t in tables)
    without = dataclasses.replace(parameters, layers=parameters.layers[:1])
    assert detach_tables(without) == (without, [])
