"""Compiles whole steps of the released model for a GPU that is not there, with the kernels inside.

One layer of each kind at full width, or with --all every layer: a decode and a prefill step. Says
how often each kernel stands in the program and which arrays there are too large for one that has
kernels: scores of every entry of the context, or weights of all experts widened. Exits 1 if an
operation that has a kernel is without it, or if there is such an array. Needs the extra `gpu-aot`.

    JAX_PLATFORMS=cpu python scripts/step_report.py [--step decode] [--all] [--json FILE]
"""

import argparse
import collections
import dataclasses
import functools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import StepShape, buffer_size
from deepinfer_jax.cache import CacheLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.model import Model, Weights
from deepinfer_jax.parameter_table import abstract_parameters
from deepinfer_jax.precision import Precision
from deepinfer_jax.steps import run_step
from deepinfer_jax.topology import Topology
from pallas_kernels.targets import by_name
from scripts.deviceless import compile_only

BLOCKS = 520
"""Columns of a block table: a context of a length that no other array has."""
SHAPES = {
    "decode": StepShape(64, 64, BLOCKS, samples_every_token=True),
    "prefill": StepShape(1, 1024, BLOCKS, samples_every_token=False),
}
WITH_KERNELS = (
    "scaled_matmul",
    "grouped_matmul",
    "sparse_attention",
    "index_topk",
    "hyper_mix",
    "cache_append",
    "sample_tokens",
)
_KERNEL = re.compile(r'custom_call_target="mosaic_gpu_v2".*?op_name="([^"]*)"')
_FLOATS = re.compile(r"\b(?:f32|bf16|f16)\[([0-9,]+)\]")


def main() -> None:
    """Prints the figures of each step and fails if one lacks a kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", choices=SHAPES, help="only this one")
    parser.add_argument("--target", default="h200", help="GPU to compile for")
    parser.add_argument("--all", action="store_true", help="all layers, not one of each kind")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    released = ModelConfig.released()
    config = without_drafts(released) if args.all else one_layer_of_each_kind(released)
    rows, faults = [], []
    for name in [args.step] if args.step else SHAPES:
        row = step_row(name, config, args.target)
        rows.append(row)
        faults += step_faults(row)
        print(json.dumps(row, indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(bool(faults))


def without_drafts(config: ModelConfig) -> ModelConfig:
    """The text model alone."""
    return dataclasses.replace(
        config,
        compress_ratios=config.compress_ratios[: config.num_hidden_layers],
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        vision=None,
    )


def one_layer_of_each_kind(config: ModelConfig) -> ModelConfig:
    """Seven layers at full width: window, window with Engram, own entries of ratio 2, a reader
    of them, own entries of ratio 1 with candidates, a reader, and one that chooses anew.
    """
    return dataclasses.replace(
        without_drafts(config),
        num_hidden_layers=7,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        candidate_source_layer_id=4,
        engram_layer_ids=(1,),
        engram_num_embeddings=config.engram_num_embeddings[:1],
    )


def compiled_text(name: str, config: ModelConfig, target: str) -> str:
    """Text of the compiled program of a step."""
    shape = SHAPES[name]
    precision = Precision(compute_dtype=jnp.bfloat16, quantise_activations=True)
    # Ids stand for themselves, as far as there are classes.
    classes = np.arange(config.vocab_size) % config.engram_compressed_vocab_size
    model = Model(config, Topology.of(config), EngramTables.of(config, classes), precision)
    blocks = shape.num_rows * BLOCKS // 8 + 2
    layout = CacheLayout(config, precision, num_blocks=blocks, num_slots=shape.num_rows + 1)
    parameters = abstract_parameters(config, ("text",))
    classes_of_ids: Any = jax.ShapeDtypeStruct((config.vocab_size,), jnp.int32)
    buffer = jax.ShapeDtypeStruct((buffer_size(shape),), jnp.int32)
    step = functools.partial(run_step, model, shape)
    arguments = (Weights(parameters, classes_of_ids), buffer, layout.abstract())
    return compile_only(by_name(target), step, arguments, donate_argnums=2).as_text()


def step_row(name: str, config: ModelConfig, target: str) -> dict[str, Any]:
    """The figures of one step."""
    started = time.perf_counter()
    text = compiled_text(name, config, target)
    return {
        "step": name,
        "target": target,
        "layers": config.num_hidden_layers,
        "kernels": kernels_in(text),
        "too_large": too_large(text, config),
        "compile_s": time.perf_counter() - started,
    }


def kernels_in(text: str) -> dict[str, int]:
    """How many kernels of each operation stand in a compiled program."""
    scopes = [set(found.group(1).split("/")) for found in _KERNEL.finditer(text)]
    count = collections.Counter(op for scope in scopes for op in WITH_KERNELS if op in scope)
    return {op: count[op] for op in WITH_KERNELS}


def too_large(text: str, config: ModelConfig) -> list[str]:
    """Shapes of floating-point arrays that only a reference makes."""
    entries = {BLOCKS * 128, BLOCKS * 128 // 2}
    expert = {config.n_routed_experts, config.moe_intermediate_size, config.hidden_size}
    found = set()
    for match in _FLOATS.finditer(text):
        dims = {int(d) for d in match.group(1).split(",")}
        if dims & entries or expert <= dims:
            found.add(match.group(0))
    return sorted(found)


def step_faults(row: dict[str, Any]) -> list[str]:
    """What a step must not show, in words."""
    place = f"{row['step']} step"
    faults = [f"{place}: no kernel of {op}" for op, count in row["kernels"].items() if not count]
    return faults + [f"{place}: holds {shape}" for shape in row["too_large"]]


if __name__ == "__main__":
    main()
