"""A checkpoint directory in the Hugging Face layout -> `ModelConfig`, Engram constants, parameters.

The directory holds `config.json`, `tokenizer.json` and the weights: either `model.safetensors`
or the files that `model.safetensors.index.json` names. Loading goes in this order:

1. read every header and compare every tensor (name, shape, type; all parts of the model, also
   those not wanted) with `parameter_table`; nothing is allocated until all of it fits;
2. for each leaf of the wanted parts, map its tensors, stack experts, and hand the packed arrays
   to `place`, which puts them on devices.

Quantised weights are never decoded here. At any time the host holds the mapped files and at most
one stacked leaf.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig, ModelConfigError
from deepinfer_jax.engram_tables import EngramTables, read_token_classes
from deepinfer_jax.parameter_table import (
    ParameterSpec,
    TensorSpec,
    build_parameters,
    build_vision,
    parameter_table,
)
from deepinfer_jax.parameters import Parameters, VisionParameters
from deepinfer_jax.safetensors_file import CheckpointError, SafetensorsFile
from deepinfer_jax.topology import Topology
from pallas_kernels.scaled_array import Format, ScaledArray

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_NAMES_SHOWN = 5
_NAME_LENGTH_SHOWN = 200
"""Limits of a message: a checkpoint of another model has thousands of other names, and a damaged
one may have a name of any length."""

_OPTIONAL_PREFIX = "model."

Place = Callable[[np.ndarray, tuple[str, ...]], Any]


def place_on_default_device(array: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
    """A copy of `array` on the default device, whatever its logical `axes`.

    The copy matters: on a CPU, `jax.device_put` would go on using the mapped file, and a file
    that is replaced while the model runs would change the model.
    """
    return jnp.array(array, copy=True)


def read_config(directory: str | Path) -> ModelConfig:
    """The configuration of a checkpoint directory, with its layer map checked.

    Raises:
        CheckpointError: no such directory, no `config.json`, or a config that is refused.
    """
    directory = _existing(directory)
    path = _existing_file(directory, CONFIG_FILE)
    try:
        config = ModelConfig.from_hf(path)
    except ModelConfigError as error:
        raise CheckpointError(str(error)) from error
    try:
        Topology.of(config)
    except ModelConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return config


def read_engram_tables(directory: str | Path, config: ModelConfig) -> EngramTables:
    """Engram constants from the config and the directory's `tokenizer.json`.

    Raises:
        CheckpointError: the tokenizer is missing, unreadable, or has another number of token
            classes than the config says; a table height does not follow from the config.
    """
    path = _existing_file(_existing(directory), TOKENIZER_FILE)
    try:
        token_classes = read_token_classes(path, config.vocab_size)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    try:
        return EngramTables.of(config, token_classes)
    except ModelConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def load(
    directory: str | Path,
    config: ModelConfig,
    *,
    place: Place = place_on_default_device,
    parts: Collection[str] = frozenset({"text"}),
    report: Callable[[int, int], None] | None = None,
) -> Parameters:
    """Reads the parameters of `parts` ("text", "draft", "vision"; parts not loaded are None).

    `place(array, axes)` puts one packed numpy array on devices; codes and scales of a quantised
    weight come in two calls with the same logical axes. The array may be a read-only view of a
    mapped file: copy it if it is to outlive the file, or return it to leave a leaf in the file.
    `report(done, total)` is called with bytes after each leaf.

    Raises:
        CheckpointError: a file is missing or damaged, or the tensors are not exactly those that
            `config` describes. Nothing has been allocated then.
        ValueError: `parts` names an unknown part or leaves out "text".
    """
    return build_parameters(config, _reader(directory, config, place, parts, report), parts)


def load_vision(
    directory: str | Path, config: ModelConfig, *, place: Place = place_on_default_device
) -> VisionParameters | None:
    """Reads the image encoder alone, as `load` does; None if the model has none.

    Raises:
        CheckpointError: as of `load`.
    """
    return build_vision(config, _reader(directory, config, place, {"vision"}, None))


def _reader(
    directory: str | Path,
    config: ModelConfig,
    place: Place,
    parts: Collection[str],
    report: Callable[[int, int], None] | None,
) -> Callable[[ParameterSpec], jax.Array | ScaledArray]:
    """What reads one leaf, after all files were checked."""
    files = _matching_files(_existing(directory), config)
    total = sum(_size_bytes(spec) for spec in parameter_table(config) if spec.part in parts)
    done = 0

    def read_leaf(spec: ParameterSpec) -> jax.Array | ScaledArray:
        nonlocal done
        tensors = spec.tensors()
        form = spec.storage
        leaf: jax.Array | ScaledArray
        if isinstance(form, Format):
            # Values and scales alternate, expert by expert.
            codes = place(_stacked(files, tensors[0::2], spec.num_stacked), spec.axes)
            scale = place(_stacked(files, tensors[1::2], spec.num_stacked), spec.axes)
            leaf = ScaledArray(codes, scale, form)
        else:
            leaf = place(_stacked(files, tensors, spec.num_stacked), spec.axes)
        done += _size_bytes(spec)
        if report is not None:
            report(done, total)
        return leaf

    return read_leaf


def _size_bytes(spec: ParameterSpec) -> int:
    return sum(tensor.size_bytes for tensor in spec.tensors())


def _stacked(
    files: dict[str, tuple[SafetensorsFile, str]],
    tensors: tuple[TensorSpec, ...],
    num_stacked: int,
) -> np.ndarray:
    """The one tensor itself, or all of them copied into one array with a leading dimension."""
    views = [file.read(name) for file, name in (files[tensor.name] for tensor in tensors)]
    return np.stack(views) if num_stacked else views[0]


def _matching_files(directory: Path, config: ModelConfig) -> dict[str, tuple[SafetensorsFile, str]]:
    """For each tensor name without prefix, its file and its name in there; all checked."""
    found: dict[str, tuple[SafetensorsFile, str]] = {}
    for file in _weight_files(directory):
        for stored in file.tensors:
            name = stored.removeprefix(_OPTIONAL_PREFIX)
            if name in found:
                other, other_name = found[name]
                raise CheckpointError(
                    f"{file.path}: tensor {stored} is also in {other.path.name} as {other_name}; "
                    "expected each tensor once"
                )
            found[name] = file, stored
    expected = {t.name: t for spec in parameter_table(config) for t in spec.tensors()}
    wrong = []
    for name, (file, stored) in found.items():
        if name in expected:
            have, want = file.tensors[stored], expected[name]
            if (have.shape, have.dtype) != (want.shape, want.dtype):
                wrong.append(
                    f"{stored} is {have.dtype} {list(have.shape)}, expected {want.dtype} "
                    f"{list(want.shape)}"
                )
    missing = [name for name in expected if name not in found]
    extra = [stored for name, (_, stored) in found.items() if name not in expected]
    problems = [
        f"{len(names)} {kind}: {_some(names)}"
        for kind, names in (("missing", missing), ("wrong", wrong), ("not expected", extra))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{directory}: the tensors do not match {CONFIG_FILE}; {'; '.join(problems)}"
        )
    return found


def _weight_files(directory: Path) -> list[SafetensorsFile]:
    """All weight files, after checking that the index and the files agree."""
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        if not (directory / WEIGHTS_FILE).is_file():
            raise CheckpointError(
                f"{directory}: holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; expected one of them"
            )
        return [SafetensorsFile(directory / WEIGHTS_FILE)]
    weight_map = _read_index(index_path)
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index_path}: names files that are not in the directory: {_some(absent)}; "
            "copy them here"
        )
    files = [SafetensorsFile(directory / name) for name in names]
    for file in files:
        listed = {name for name, where in weight_map.items() if where == file.path.name}
        unlike = listed ^ file.tensors.keys()
        if unlike:
            raise CheckpointError(
                f"{file.path}: its tensors are not those that {INDEX_FILE} names; listed but not "
                f"there: {_some(sorted(listed - file.tensors.keys()))}; there but not listed: "
                f"{_some(sorted(file.tensors.keys() - listed))}"
            )
    return files


def _read_index(path: Path) -> dict[str, str]:
    try:
        parsed: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path}: has no "weight_map" object of tensor name to file name')
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{path}: tensor {tensor} is said to be in {name!r}; expected the name of a file "
                "in the same directory"
            )
    return weight_map


def _existing(directory: str | Path) -> Path:
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: no such directory; expected one that holds {CONFIG_FILE}, "
            f"{TOKENIZER_FILE} and {WEIGHTS_FILE} or {INDEX_FILE}"
        )
    return directory


def _existing_file(directory: Path, name: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; copy it from the model's repository")
    return path


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:_NAME_LENGTH_SHOWN] for name in names[:_NAMES_SHOWN]) or "none"
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
