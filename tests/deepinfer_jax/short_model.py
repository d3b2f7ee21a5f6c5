"""Five layers of the golden checkpoint on any mesh, for tests that compile many steps.

One layer of each kind is left: windows alone, windows with an Engram, entries of two tokens,
entries of one token with candidates, and one that selects among those.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import StepShape
from deepinfer_jax.cache import CacheLayout, KVCache
from deepinfer_jax.mesh_steps import whole_layout
from deepinfer_jax.model import Model, Weights
from deepinfer_jax.parameter_table import build_parameters
from deepinfer_jax.precision import CacheFormat, Precision
from deepinfer_jax.safetensors_file import SafetensorsFile
from deepinfer_jax.steps import CompiledStep, compile_step
from deepinfer_jax.topology import Topology
from sharding.collectives import StepGroups
from sharding.mesh import DeviceMesh
from sharding.plan import MeshPlan
from tests.deepinfer_jax import golden_model

_LAYERS = (0, 1, 2, 6, 8)

_CHANGES: dict[str, Any] = {
    "num_hidden_layers": len(_LAYERS),
    "compress_ratios": (0, 0, 2, 1, 1, 0, 0, 0),
    "kv_source_layer_ids": (2, 3),
    "index_source_layer_ids": (2, 3, 4),
    "candidate_source_layer_id": 3,
    "engram_layer_ids": (1,),
    "dspark_target_layer_ids": (2, 3, 4),
}


class ShortModel(NamedTuple):
    """A model on a mesh: weights on its devices, `layout` the cache of each device."""

    mesh: DeviceMesh
    model: Model
    weights: Weights
    layout: CacheLayout

    def zeros(self) -> KVCache:
        """Empty caches of all devices."""
        whole = whole_layout(self.layout, self.model.groups)
        shardings = self.mesh.tree_shardings(whole.abstract(), whole.logical_axes())
        return jax.jit(whole.zeros, out_shardings=shardings)()

    def compiled(self, shape: StepShape) -> CompiledStep:
        """The step of a shape, compiled in less than half the time for no other results."""
        options = {"xla_backend_optimization_level": 0}
        return compile_step(self.model, shape, self.weights, self.zeros(), compiler_options=options)


def load(
    plan: MeshPlan,
    *,
    quantise_activations: bool = False,
    has_draft: bool = False,
    num_blocks: int = 8,
    num_slots: int = 4,
) -> ShortModel:
    """The model on the mesh of `plan`, in float32 with a quantised cache."""
    whole, weights = golden_model.load("kvq")
    config = dataclasses.replace(
        whole.config,
        engram_num_embeddings=whole.config.engram_num_embeddings[:1],
        vision=None,
        **_CHANGES,
    )
    tables = dataclasses.replace(
        whole.engram,
        multipliers=whole.engram.multipliers[:1],
        moduli=whole.engram.moduli[:1],
        offsets=whole.engram.offsets[:1],
    )
    layers = tuple(weights.parameters.layers[index] for index in _LAYERS)
    draft = weights.parameters.draft if has_draft else None
    parameters = dataclasses.replace(weights.parameters, layers=layers, draft=draft, vision=None)
    mesh = DeviceMesh.of(plan)
    parts = {"text", "draft"} if has_draft else {"text"}
    names = build_parameters(config, lambda spec: spec.axes, parts)
    shardings = mesh.tree_shardings(parameters, names)
    classes = np.asarray(weights.token_classes)
    precision = Precision(jnp.float32, CacheFormat.KVQ, quantise_activations)
    return ShortModel(
        mesh,
        Model(config, Topology.of(config), tables, precision, groups=StepGroups.of(plan)),
        Weights(jax.device_put(parameters, shardings), mesh.place(classes, ("vocab",))),
        CacheLayout(config, precision, num_blocks, num_slots, has_draft=has_draft),
    )


def write(directory: Path) -> Path:
    """Write the same model as a checkpoint, and return its directory."""
    source = golden_model.DIRECTORY
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    text |= _CHANGES | {"engram_num_embeddings": text["engram_num_embeddings"][:1]}
    del config["vision_config"]
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    file = SafetensorsFile(source / "model.safetensors")
    header: dict[str, Any] = {}
    chunks: list[bytes] = []
    offset = 0
    for name, tensor in file.tensors.items():
        kind, *rest = name.split(".")
        if kind in ("vision", "aligner") or kind.startswith("image_"):
            continue
        if kind == "layers":
            number = int(rest[0])
            if number not in _LAYERS:
                continue
            kept = ".".join((kind, str(_LAYERS.index(number)), *rest[1:]))
        else:
            kept = name
        chunks.append(file.read(name).tobytes())
        end = offset + len(chunks[-1])
        header[kept] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    words = json.dumps(header).encode()
    head = len(words).to_bytes(8, "little") + words
    (directory / "model.safetensors").write_bytes(head + b"".join(chunks))
    return directory
