"""From trained weights to a checkpoint directory in the published layout, and back for a check."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax import checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameter_table import DTYPES, ParameterSpec, parameter_table
from deepinfer_jax.parameters import Parameters
from pallas_kernels.scaled_array import ScaledArray
from scripts.tiny_model.weights import packed, storage_of

_ALIGNMENT = 8


def write_weights(config: ModelConfig, parameters: Parameters, directory: Path) -> int:
    """Packs `parameters` (float32, text and draft) into `model.safetensors` and writes the index;
    returns bytes of the file.

    Raises:
        CheckpointError: what was written is not what the loader wants; cannot happen unless the
            parameters belong to another config.
    """
    stored = packed(parameters, storage_of(config))
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for spec in parameter_table(config):
        for tensor, values in zip(spec.tensors(), _arrays(spec, stored), strict=True):
            assert values.shape == tensor.shape, (tensor.name, values.shape, tensor.shape)
            tensors[tensor.name] = (tensor.dtype, values)
    size = _write_safetensors(tensors, directory / checkpoint.WEIGHTS_FILE)
    total = sum(values.nbytes for _, values in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict.fromkeys(tensors, checkpoint.WEIGHTS_FILE),
    }
    text = json.dumps(index, indent=1) + "\n"
    (directory / checkpoint.INDEX_FILE).write_text(text, encoding="utf-8")
    checkpoint.load(directory, config, parts={"text", "draft"})
    return size


def _arrays(spec: ParameterSpec, tree: Any) -> list[np.ndarray]:
    """The stored arrays of a leaf, in the order of `spec.tensors()`."""
    leaf = tree
    for step in spec.path:
        leaf = leaf[step] if isinstance(step, int) else getattr(leaf, step)
    both = [leaf.codes, leaf.scale] if isinstance(leaf, ScaledArray) else [leaf]
    arrays = [np.asarray(jax.device_get(part)) for part in both]
    if not spec.num_stacked:
        return arrays
    return [part[expert] for expert in range(spec.num_stacked) for part in arrays]


def _write_safetensors(tensors: dict[str, tuple[str, np.ndarray]], path: Path) -> int:
    """The format by hand, since no library writes power-of-two scales: the length of a JSON header,
    the header, the bytes in order of names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        dtype, values = tensors[name]
        assert values.dtype.itemsize == DTYPES[dtype].itemsize, (name, values.dtype, dtype)
        end = offset + math.prod(values.shape) * values.dtype.itemsize
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            file.write(np.ascontiguousarray(tensors[name][1]).tobytes())
    return path.stat().st_size
