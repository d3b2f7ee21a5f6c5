"""Greedy generation with drafts on the compiled steps, several prompts side by side.

A plain loop over `deepinfer_jax.steps`, without scheduler: every decode step verifies all drafts of
every sequence. It shows what the draft module is worth, apart from any policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import checkpoint
from deepinfer_jax.batch import StepShape, pack
from deepinfer_jax.cache import BLOCK_SIZE, CacheLayout
from deepinfer_jax.model import Model, Weights
from deepinfer_jax.precision import CacheFormat, Precision
from deepinfer_jax.steps import SpeculativeResult, compile_step
from deepinfer_jax.topology import Topology


@dataclass(frozen=True, slots=True)
class Drafted:
    """token_ids that were generated, and the decode steps that it took after the prompt's."""

    token_ids: list[int]
    num_steps: int


class DraftingModel:
    """A checkpoint compiled for `num_rows` sequences of up to `num_blocks` blocks each."""

    def __init__(self, directory: Path, *, num_rows: int = 8, num_blocks: int = 6) -> None:
        config = checkpoint.read_config(directory)
        tables = checkpoint.read_engram_tables(directory, config)
        precision = Precision(jnp.float32, CacheFormat.KVQ)
        self._config, self._num_rows, self._num_blocks = config, num_rows, num_blocks
        model = Model(config, Topology.of(config), tables, precision)
        parameters = checkpoint.load(directory, config, parts={"text", "draft"})
        self._weights = Weights(parameters, jnp.asarray(tables.token_classes))
        self._layout = CacheLayout(
            config, precision, num_rows * num_blocks + 1, num_rows + 1, has_draft=True
        )
        size = config.dspark_block_size + 1
        length = num_blocks * BLOCK_SIZE
        self._prefill_shape = StepShape(1, length, num_blocks, samples_every_token=False)
        self._decode_shape = StepShape(
            num_rows, num_rows * size, num_blocks, samples_every_token=True
        )
        cache = self._layout.abstract()
        self._prefill = compile_step(model, self._prefill_shape, self._weights, cache)
        self._decode = compile_step(model, self._decode_shape, self._weights, cache)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens_max: int) -> list[Drafted]:
        """Answers to up to `num_rows` prompts, each to its end or `num_tokens_max` tokens."""
        assert len(prompts) <= self._num_rows, len(prompts)
        cache = self._layout.zeros()
        answers: list[list[int]] = []
        for row, prompt in enumerate(prompts):
            result, cache = self._run(
                self._prefill, self._prefill_shape, [(list(prompt), 0, row)], cache
            )
            answers.append([int(result.tokens[0, 0])])
        steps = [0] * len(prompts)
        size = self._config.dspark_block_size + 1
        while True:
            running = [
                row for row, said in enumerate(answers) if not self._is_over(said, num_tokens_max)
            ]
            if not running:
                return [Drafted(*both) for both in zip(answers, steps, strict=True)]
            rows = []
            for row in running:
                start = len(prompts[row]) + len(answers[row]) - 1
                rows.append(([answers[row][-1]] * size, start, row))
            result, cache = self._run(self._decode, self._decode_shape, rows, cache)
            for index, row in enumerate(running):
                steps[row] += 1
                for token in result.tokens[index].tolist():
                    if token >= 0 and not self._is_over(answers[row], num_tokens_max):
                        answers[row].append(token)

    def _is_over(self, said: list[int], num_tokens_max: int) -> bool:
        return said[-1] == self._config.eos_token_id or len(said) >= num_tokens_max

    def _run(
        self, step: Any, shape: StepShape, rows: list[tuple[list[int], int, int]], cache: Any
    ) -> tuple[SpeculativeResult, Any]:
        """One step over rows of (token ids, first position, sequence)."""
        arrays = {
            "token_ids": np.zeros(shape.num_tokens, np.int32),
            "row_index": np.full(shape.num_tokens, shape.num_rows, np.int32),
            "block_tables": np.zeros((shape.num_rows, shape.num_blocks), np.int32),
            "temperatures": np.zeros(shape.num_rows, np.float32),
            "top_ps": np.ones(shape.num_rows, np.float32),
        }
        for name in ("starts", "num_tokens", "slots", "top_ks"):
            arrays[name] = np.zeros(shape.num_rows, np.int32)
        for name in ("seed_low", "seed_high"):
            arrays[name] = np.zeros(shape.num_rows, np.uint32)
        place = 0
        for index, (token_ids, start, sequence) in enumerate(rows):
            here = slice(place, place + len(token_ids))
            arrays["token_ids"][here], arrays["row_index"][here] = token_ids, index
            arrays["starts"][index], arrays["num_tokens"][index] = start, len(token_ids)
            arrays["slots"][index] = sequence + 1
            first = sequence * self._num_blocks + 1
            arrays["block_tables"][index] = np.arange(first, first + self._num_blocks)
            place += len(token_ids)
        words, cache = step(self._weights, jnp.asarray(pack(arrays, shape)), cache)
        return SpeculativeResult.unpack(np.asarray(jax.device_get(words))), cache
