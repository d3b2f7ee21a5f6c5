"""Goal: a good checkpoint loads to exactly its values, packed; a bad one is refused by name.

Method: load the golden checkpoint and compare with golden decoded values and with its raw bytes;
then write variants of it (one thing wrong each) into a temporary folder and look for the tensor or
file in the one-line message, and that nothing was placed on a device.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax.checkpoint import load, read_config, read_engram_tables
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameter_table import PARTS, abstract_parameters, parameter_table
from deepinfer_jax.safetensors_file import CheckpointError, SafetensorsFile
from pallas_kernels.scaled_array import ScaledArray, decode

TINY = ModelConfig.tiny()


class Copy:
    """A checkpoint directory that tests may spoil: header entries with their bytes beside."""

    def __init__(self, source: Path, directory: Path) -> None:
        self.directory = directory
        for name in ("config.json", "tokenizer.json"):
            (directory / name).write_bytes((source / name).read_bytes())
        file = SafetensorsFile(source / "model.safetensors")
        self.tensors = {
            name: (stored.dtype, list(stored.shape), file.read(name).tobytes())
            for name, stored in file.tensors.items()
        }

    def write(self, name: str = "model.safetensors", keep: Callable[[str], bool] = bool) -> Path:
        """Writes the tensors whose name `keep` accepts into one file."""
        header, chunks, begin = {}, [], 0
        for tensor, (dtype, shape, data) in self.tensors.items():
            if keep(tensor):
                offsets = [begin, begin + len(data)]
                header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
                chunks.append(data)
                begin += len(data)
        text = json.dumps(header).encode()
        # Data begin at a multiple of 64, as in files of the library: JAX uses such memory as is.
        text += b" " * (-(8 + len(text)) % 64)
        path = self.directory / name
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))
        return path

    def write_index(self, weight_map: object) -> None:
        """Writes `weight_map` as the index."""
        path = self.directory / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def write_shards(self) -> dict[str, str]:
        """Text layers in one file, everything else in another, and the index."""
        first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
        self.write(first, lambda tensor: tensor.startswith("layers."))
        self.write(second, lambda tensor: not tensor.startswith("layers."))
        weight_map = {t: first if t.startswith("layers.") else second for t in self.tensors}
        self.write_index(weight_map)
        return weight_map


@pytest.fixture
def tiny(golden: Path) -> Path:
    """The golden checkpoint, not to be changed."""
    return golden / "tiny-v41"


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Copy:
    """A copy of the golden checkpoint without weight files; the test writes them."""
    return Copy(tiny, tmp_path)


def _refusal(directory: Path) -> str:
    """The message of a refused load, which must come before anything is placed."""

    def place(array: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
        raise AssertionError("an array was placed although the checkpoint is bad")

    with pytest.raises(CheckpointError) as refusal:
        load(directory, TINY, place=place)
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 2000
    return message


def _equal(some: object, other: object) -> bool:
    pairs = zip(jax.tree.leaves(some), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_golden_values(tiny: Path, golden: Path) -> None:
    parameters: Any = load(tiny, read_config(tiny))
    layers = parameters.layers
    with np.load(golden / "ops.npz") as ops:
        for name, weight in (
            ("layers.0.attn.wq_b", layers[0].attn.wq_b),
            ("layers.0.ffn.experts.3.w2", layers[0].ffn.experts.w2[3]),
            ("layers.1.engram.embed", layers[1].engram.embed),
        ):
            np.testing.assert_array_equal(decode(weight)[:64], ops[f"dequant:{name}"])


def test_every_part_has_the_shapes_of_the_table_and_the_bytes_of_the_file(tiny: Path) -> None:
    parameters = load(tiny, TINY, parts=PARTS)
    expected = abstract_parameters(TINY)
    assert jax.tree.structure(parameters) == jax.tree.structure(expected)
    for leaf, want in zip(jax.tree.leaves(parameters), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
    file = SafetensorsFile(tiny / "model.safetensors")
    for spec in parameter_table(TINY):
        leaf: Any = parameters
        for step in spec.path:
            leaf = leaf[step] if isinstance(step, int) else getattr(leaf, step)
        tensors = spec.tensors()
        arrays = [leaf.codes, leaf.scale] if isinstance(leaf, ScaledArray) else [leaf]
        for i, array in enumerate(arrays):
            stored = b"".join(file.read(t.name).tobytes() for t in tensors[i :: len(arrays)])
            assert np.asarray(array).tobytes() == stored, spec.name


def test_only_the_wanted_parts_are_read(tiny: Path) -> None:
    parameters = load(tiny, TINY)
    assert parameters.draft is None
    assert parameters.vision is None
    assert load(tiny, TINY, parts={"text", "draft"}).draft is not None


def test_placement_sees_packed_arrays_with_their_axes(tiny: Path) -> None:
    seen: list[tuple[tuple[str, ...], np.ndarray]] = []

    def place(array: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
        seen.append((axes, array))
        return jax.numpy.array(array)

    load(tiny, TINY, place=place)
    assert all(len(axes) == array.ndim for axes, array in seen)
    experts = [array for axes, array in seen if axes == ("experts", "ffn", "embed")]
    assert [(a.dtype.name, a.shape) for a in experts[:2]] == [
        ("uint8", (16, 64, 32)),
        ("float8_e8m0fnu", (16, 64, 2)),
    ]


def test_progress_counts_the_bytes_of_the_wanted_parts(tiny: Path) -> None:
    calls: list[tuple[int, int]] = []
    parameters = load(tiny, TINY, report=lambda *call: calls.append(call))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    assert {call[1] for call in calls} == {total}
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == total


def test_the_default_placement_does_not_depend_on_the_file(copy: Copy) -> None:
    """Replacing the file of a running model must not change the model."""
    path = copy.write()
    parameters = load(copy.directory, TINY)
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(parameters)]
    with path.open("r+b") as stream:
        stream.write(b"\xff" * path.stat().st_size)
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(parameters)] == before


def test_shards_and_prefix_give_the_same_model(tiny: Path, copy: Copy) -> None:
    expected = load(tiny, TINY)
    copy.write_shards()
    assert _equal(load(copy.directory, TINY), expected)
    copy.tensors = {f"model.{name}": tensor for name, tensor in copy.tensors.items()}
    copy.write_shards()
    assert _equal(load(copy.directory, TINY), expected)


def test_one_file_needs_no_index(tiny: Path, copy: Copy) -> None:
    copy.write()
    assert _equal(load(copy.directory, TINY), load(tiny, TINY))


def test_missing_tensors_of_any_part_are_named(copy: Copy) -> None:
    for name in ("layers.3.ffn.experts.7.w2.scale", "mtp.1.attn.attn_sink", "aligner.w1.bias"):
        del copy.tensors[name]
    copy.write()
    message = _refusal(copy.directory)
    assert f"{copy.directory}: the tensors do not match config.json; 3 missing: " in message
    assert "layers.3.ffn.experts.7.w2.scale, mtp.1.attn.attn_sink, aligner.w1.bias" in message


def test_extra_tensors_are_named(copy: Copy) -> None:
    copy.tensors["layers.12.attn_norm.weight"] = copy.tensors["layers.0.attn_norm.weight"]
    copy.write()
    assert "1 not expected: layers.12.attn_norm.weight" in _refusal(copy.directory)


def test_a_name_of_any_length_gives_a_short_message(copy: Copy) -> None:
    copy.tensors["x" * 5000] = copy.tensors["norm.weight"]
    copy.write()
    assert "1 not expected: xxxx" in _refusal(copy.directory)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "expected"),
    [
        ("head.weight", "BF16", [64, 320], "expected BF16 [320, 64]"),
        ("norm.weight", "F32", [32], "expected BF16 [64]"),
        ("layers.0.attn.wq_a.scale", "F8_E8M0", [2, 3], "expected F8_E8M0 [3, 2]"),
        ("layers.0.attn.wq_a.scale", "F8_E4M3", [3, 2], "expected F8_E8M0 [3, 2]"),
        ("layers.0.ffn.experts.0.w1.weight", "F8_E4M3", [64, 32], "expected I8 [64, 32]"),
        ("layers.1.engram.embed.weight", "F8_E4M3", [64, 864], "expected F8_E4M3 [864, 64]"),
    ],
)
def test_a_wrong_shape_or_type_is_named(
    copy: Copy, name: str, dtype: str, shape: list[int], expected: str
) -> None:
    copy.tensors[name] = (dtype, shape, copy.tensors[name][2])
    copy.write()
    assert f"1 wrong: {name} is {dtype} {shape}, {expected}" in _refusal(copy.directory)


def test_an_unknown_type_is_named(copy: Copy) -> None:
    copy.tensors["norm.weight"] = ("I64", [16], copy.tensors["norm.weight"][2])
    copy.write()
    assert "tensor norm.weight has dtype 'I64'" in _refusal(copy.directory)


def test_a_checkpoint_of_another_model_gives_a_short_message(tiny: Path) -> None:
    released = ModelConfig.released()
    with pytest.raises(CheckpointError) as refusal:
        load(tiny, released)
    message = str(refusal.value)
    names = [{t.name for s in parameter_table(c) for t in s.tensors()} for c in (released, TINY)]
    assert f"{len(names[0] - names[1])} missing: " in message
    assert f"{len(names[1] - names[0])} not expected: " in message
    assert "more; " in message
    assert len(message) < 2000


def test_a_tensor_with_and_without_prefix_is_refused(copy: Copy) -> None:
    copy.tensors["model.norm.weight"] = copy.tensors["norm.weight"]
    copy.write()
    assert "tensor model.norm.weight is also in model.safetensors as norm.weight" in _refusal(
        copy.directory
    )


def test_a_truncated_file_is_named(copy: Copy) -> None:
    path = copy.write()
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(size // 2)
    assert f"{path}: truncated, {size // 2} bytes of {size}" in _refusal(copy.directory)


def test_a_missing_shard_is_named(copy: Copy) -> None:
    copy.write_shards()
    (copy.directory / "model-00001-of-00002.safetensors").unlink()
    message = _refusal(copy.directory)
    assert "index.json: names files that are not in the directory: model-00001-of" in message


def test_an_index_that_names_a_tensor_elsewhere_is_refused(copy: Copy) -> None:
    weight_map = copy.write_shards()
    weight_map["norm.weight"] = "model-00001-of-00002.safetensors"
    copy.write_index(weight_map)
    message = _refusal(copy.directory)
    assert "model-00001-of-00002.safetensors: its tensors are not those" in message
    assert "listed but not there: norm.weight; there but not listed: none" in message


def test_a_tensor_that_the_index_leaves_out_is_refused(copy: Copy) -> None:
    weight_map = copy.write_shards()
    del weight_map["norm.weight"]
    copy.write_index(weight_map)
    assert "there but not listed: norm.weight" in _refusal(copy.directory)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "index.json: not readable as JSON"),
        ("[]", 'index.json: has no "weight_map" object'),
        ('{"weight_map": {}}', 'index.json: has no "weight_map" object'),
        ('{"weight_map": {"norm.weight": "../x"}}', "norm.weight is said to be in '../x'"),
        ('{"weight_map": {"norm.weight": 3}}', "norm.weight is said to be in 3"),
        ('{"weight_map": {"norm.weight": ".."}}', "not in the directory: .."),
    ],
)
def test_a_broken_index_is_named(copy: Copy, content: str, reason: str) -> None:
    copy.write()
    (copy.directory / "model.safetensors.index.json").write_text(content)
    assert reason in _refusal(copy.directory)


def test_a_directory_without_weights_says_what_was_expected(copy: Copy) -> None:
    message = _refusal(copy.directory)
    assert "holds neither model.safetensors nor model.safetensors.index.json" in message


def test_config_and_engram_tables_of_a_directory(tiny: Path) -> None:
    config = read_config(tiny)
    assert config == TINY
    tables = read_engram_tables(tiny, config)
    assert tables.token_classes.shape == (320,)
    assert tables.moduli.sum(axis=1).tolist() == [864, 1054]


def test_an_absent_directory_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone: no such directory; expected one that holds"):
        read_config(tmp_path / "gone")
    assert "no such directory" in _refusal(tmp_path / "gone")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_an_absent_file_is_named(copy: Copy, name: str) -> None:
    (copy.directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: no such file; copy it"):
        read_engram_tables(copy.directory, read_config(copy.directory))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("index_topk", 0, "config.json: index_topk is 0; expected more than 0"),
        ("candidate_source_layer_id", 4, "config.json: layer 8 selects .* from layer 4"),
    ],
)
def test_a_refused_config_names_its_file(copy: Copy, key: str, value: int, message: str) -> None:
    path = copy.directory / "config.json"
    parsed = json.loads(path.read_text())
    parsed["text_config"][key] = value
    path.write_text(json.dumps(parsed))
    with pytest.raises(CheckpointError, match=message):
        read_config(copy.directory)


def test_a_tokenizer_of_another_model_is_refused(copy: Copy) -> None:
    path = copy.directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    # Two tokens whose texts differ only in case become two whose texts do not.
    tokenizer["added_tokens"][-1]["content"] = "<\uff5cuser\uff5c>"
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="tokenizer.json: .* 271 token classes; expected 272"):
        read_engram_tables(copy.directory, TINY)


def test_a_broken_tokenizer_is_named(copy: Copy) -> None:
    shutil.copy(copy.directory / "config.json", copy.directory / "tokenizer.json")
    with pytest.raises(CheckpointError, match="tokenizer.json: not a readable tokenizer"):
        read_engram_tables(copy.directory, TINY)
