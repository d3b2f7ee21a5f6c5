"""`python -m serving plan --sharding FILE`: does a model fit a mesh, whom can it serve, how fast.

Bytes are counted from the table of parameters and the rules of the plan, the cache from its
layout; what steps need beside them is an estimate. Times are those of `serving.core.roofline`:
lower bounds. Nothing is allocated.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer_jax.mesh_sizing import DeviceGroup, device_weights
from deepinfer_jax.sizing import ModelSize
from serving.core.pool_sizing import PoolSizes, Traffic, size_pools
from serving.core.roofline import (
    ContextCost,
    Layout,
    ModelCosts,
    PhaseCosts,
    StepRoofline,
    StepTime,
)
from serving.planner import ModelPlan, scaled, table
from sharding import config_file
from sharding.config_file import ConfigError
from sharding.hardware import Hardware, hardware
from sharding.plan import MeshPlan, ShardingError, load_plan

_USABLE_SHARE = 0.95
"""Part of device memory that weights and cache may fill; runtime and fragments take the rest."""

_PREFILL_TOKENS = 8192
"""Tokens of a prefill step on one device."""

_ROWS_MAX = 64
"""Running sequences on one device that are planned for if no number is given."""

_PLANNED_CONTEXT = 8192
"""Tokens of a sequence that are planned for if none are given."""

_BF16_GROUPS = {"head", "router", "compressor", "hyper_connections", "norm"}
_NOT_READ_WHOLE = {"routed_experts", "embedding", "engram_table"}


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """The command `plan` with its flags; returns the exit code, 1 if the model does not fit.

    Raises:
        ConfigError: a flag or a file is not usable.
    """
    directory = None if options.model is None else Path(options.model).expanduser()
    model = ModelPlan.of(directory, options.cache_format or "kvq")
    if options.sharding is None:
        for flag in ("hardware", "context", "users", "traffic"):
            if getattr(options, flag) is not None:
                raise ConfigError(f"--{flag} was given without --sharding; expected both")
        if options.json is not None:
            write_figures(options.json, model.figures())
        say(model.text())
        return 0
    traffic = None if options.traffic is None else load_traffic(options.traffic)
    longest = model.size.config.max_position_embeddings
    context = min(_PLANNED_CONTEXT, longest) if options.context is None else options.context
    kind = hardware(options.hardware or "h200")
    fit = MeshFit.of(model, options.sharding, kind, context, options.users)
    if options.json is not None:
        write_figures(options.json, fit.figures(traffic))
    say(fit.text(traffic))
    return 0 if fit.fits else 1


class Temporaries(NamedTuple):
    """Estimated bytes that a step of one device needs beside weights and cache.

    Attributes:
        activations: residual streams, queries and attention outputs.
        exchange: tokens at experts of this device, as sent, in between and as returned.
        logits: of decoded rows, twice in float32.
    """

    activations: int
    exchange: int
    logits: int


@dataclass(frozen=True, slots=True)
class MeshFit:
    """A model on a mesh of one kind of device.

    Attributes:
        model, plan, hardware: what was planned.
        context: tokens of a sequence that were planned for.
        users: sequences that run at once on the whole mesh.
        weights: on one device.
        temporaries: on one device.
    """

    model: ModelPlan
    plan: MeshPlan
    hardware: Hardware
    context: int
    users: int
    weights: tuple[DeviceGroup, ...]
    temporaries: Temporaries

    @classmethod
    def of(
        cls,
        model: ModelPlan,
        sharding: str,
        kind: Hardware,
        context: int,
        users: int | None = None,
    ) -> "MeshFit":
        """Plans a model on the mesh of a sharding file.

        `context` is the length of a sequence; `users` are sequences that run at once, None for as
        many as fit, though at most 64 on a device.

        Raises:
            ConfigError: a bad file, a model that does not divide, or a number out of range.
        """
        plan = load_plan(sharding)
        longest = model.size.config.max_position_embeddings
        if not 1 <= context <= longest:
            raise ConfigError(f"--context {context}: expected 1 to {longest} tokens")
        if users is not None and users < 1:
            raise ConfigError(f"--users {users}: expected at least 1 sequence")
        try:
            weights = device_weights(model.size.config, plan)
        except ShardingError as error:
            raise ConfigError(f"sharding {sharding}: {error}") from None
        rows = _ROWS_MAX if users is None else -(-users // plan.num_parts("batch"))
        fit = cls(model, plan, kind, context, 0, weights, _temporaries(model.size, plan, rows))
        users = users or min(fit.users_max, _ROWS_MAX * plan.num_parts("batch"))
        return cls(model, plan, kind, context, users, weights, fit.temporaries)

    @property
    def weight_bytes(self) -> int:
        """Of one device."""
        return sum(group.size_bytes for group in self.weights)

    @property
    def cache_bytes(self) -> int:
        """What is left for the cache on one device; negative if the rest does not fit."""
        usable = int(self.hardware.memory_bytes * _USABLE_SHARE)
        return usable - self.weight_bytes - sum(self.temporaries)

    @property
    def bytes_per_user(self) -> float:
        """Cache of one sequence of `context` tokens."""
        size = self.model.size
        return self.context * size.kv_bytes_per_token + sum(size.state)

    @property
    def users_max(self) -> int:
        """Sequences of `context` tokens that fit on the whole mesh."""
        return max(int(self.cache_bytes // self.bytes_per_user), 0) * self.plan.num_parts("batch")

    @property
    def kv_tokens_per_device(self) -> int:
        """Tokens of context that one device can keep, its sequences being `context` long."""
        return self.users_max // self.plan.num_parts("batch") * self.context

    @property
    def missing_bytes(self) -> float:
        """By how much a device is too small for `users`, or for one if there are none; 0 if not."""
        rows = -(-max(self.users, 1) // self.plan.num_parts("batch"))
        return max(rows * self.bytes_per_user - self.cache_bytes, 0)

    @property
    def fits(self) -> bool:
        """True if weights, temporaries and the caches of `users` fit."""
        return not self.missing_bytes

    def roofline(self, moe_lb: float = 1.0) -> StepRoofline:
        """The step times of this layout."""
        plan, config = self.plan, self.model.size.config
        devices = plan.num_parts("experts")
        layout = Layout(
            num_expert_devices=devices,
            expert_slots=(config.n_routed_experts + plan.redundant_experts) / devices,
            num_engram_devices=plan.num_parts("engram_rows") * plan.num_parts("engram_dim"),
            is_engram_on_host=plan.engram == "host",
            num_context_devices=plan.num_parts("tokens"),
            micro_batches=plan.micro_batches,
            moe_lb=moe_lb,
        )
        return StepRoofline(model_costs(self.model.size, self.weights), layout, self.hardware)

    @property
    def decode(self) -> StepTime:
        """A decode step of all `users` at `context`."""
        return self.roofline().decode(self.users / self.plan.num_parts("batch"), self.context)

    @property
    def prefill(self) -> StepTime:
        """A prefill step in the middle of a prompt of `context` tokens."""
        shared = _PREFILL_TOKENS * self.plan.num_parts("tokens")
        return self.roofline().prefill(_PREFILL_TOKENS, max(self.context - shared, 0) / 2)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of prompts that the whole mesh computes in a second."""
        step = self.prefill
        return self.plan.num_devices * _PREFILL_TOKENS / step.total_s

    def pools(self, traffic: Traffic) -> PoolSizes:
        """How many meshes like this one, as prefill and as decode workers, serve `traffic`."""
        # A worker that is sized at the mean needs room for what comes above it.
        users = max(min(self.users_max, self.users), 1)
        size = self.model.size
        return size_pools(
            traffic,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            users_per_worker=users,
            decode_step_s=self.decode.total_s,
            cache_bytes_per_token=size.kv_bytes_per_token,
        )

    def figures(self, traffic: Traffic | None = None) -> dict[str, Any]:
        """Every number, for JSON; bytes are those of one device."""
        decode, prefill = self.decode, self.prefill
        figures: dict[str, Any] = {
            "hardware": self.hardware.name,
            "num_devices": self.plan.num_devices,
            "mesh": dict(self.plan.mesh),
            "context": self.context,
            "fits": self.fits,
            "missing_bytes": self.missing_bytes,
            "weight_bytes": self.weight_bytes,
            "weight_bytes_by_group": {f"{g.part}.{g.group}": g.size_bytes for g in self.weights},
            "temporary_bytes": self.temporaries._asdict(),
            "cache_bytes": self.cache_bytes,
            "bytes_per_user": self.bytes_per_user,
            "kv_tokens_per_device": self.kv_tokens_per_device,
            "users_max": self.users_max,
            "users": self.users,
            "decode_step_ms": decode.total_s * 1e3,
            "decode_parts_ms": _parts_ms(decode),
            "decode_sent_bytes": decode.sent_bytes,
            "bound_by": decode.bound_by,
            "prefill_step_ms": prefill.total_s * 1e3,
            "prefill_parts_ms": _parts_ms(prefill),
            "prefill_sent_bytes": prefill.sent_bytes,
            "prefill_bound_by": prefill.bound_by,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
        }
        if traffic is not None and self.fits:
            figures["pools"] = self.pools(traffic)._asdict()
        return figures

    def text(self, traffic: Traffic | None = None) -> str:
        """The same as tables."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.plan.mesh.items())
        title = f"{self.plan.num_devices} {self.hardware.name} as {mesh}; bytes are of one device"
        parts = [title, self._memory(), self._verdict()]
        if self.fits:
            parts.append(self._times())
            if traffic is not None:
                parts.append(self.pools(traffic).text())
        return "\n\n".join(parts)

    def _memory(self) -> str:
        rows = [
            (f"{g.part} {g.group}".replace("_", " "), scaled(g.size_bytes, "B"))
            for g in self.weights
        ]
        rows.append(("all weights", scaled(self.weight_bytes, "B")))
        rows += [
            (f"step: {name}", scaled(size, "B"))
            for name, size in self.temporaries._asdict().items()
        ]
        rows.append(("left for the cache", scaled(max(self.cache_bytes, 0), "B")))
        return table((f"of {scaled(int(self.hardware.memory_bytes), 'B')}", "bytes"), rows)

    def _verdict(self) -> str:
        if self.fits:
            return (
                f"Fits: {self.users_max:,} sequences of {self.context:,} tokens, "
                f"{self.kv_tokens_per_device:,} tokens on each device; planned for {self.users:,}."
            )
        largest = max(self.weights, key=lambda group: group.size_bytes)
        usable = scaled(int(self.hardware.memory_bytes * _USABLE_SHARE), "B")
        rows = -(-max(self.users, 1) // self.plan.num_parts("batch"))
        return (
            f"Does not fit, by {self.missing_bytes / 1e9:.1f} GB on each device, because weights "
            f"({scaled(self.weight_bytes, 'B')}, most of them {largest.part} "
            f"{largest.group.replace('_', ' ')}), steps ({scaled(sum(self.temporaries), 'B')}) and "
            f"caches of {rows:,} sequences ({scaled(int(rows * self.bytes_per_user), 'B')}) exceed "
            f"the usable {usable}."
        )

    def _times(self) -> str:
        rows = []
        for name, step in (("decode", self.decode), ("prefill", self.prefill)):
            parts = (*_parts_ms(step).values(), step.total_s * 1e3)
            rows.append(
                (
                    f"{name} step",
                    *(f"{part:.2f}" for part in parts),
                    scaled(int(step.sent_bytes), "B"),
                    step.bound_by,
                )
            )
        header = ("at least, ms", "compute", "memory", "exchange", "all", "sent", "bound by")
        tokens_per_s = self.users / self.decode.total_s
        return (
            f"{table(header, rows)}\n"
            f"Decodes {tokens_per_s:,.0f} and prefills {self.prefill_tokens_per_s:,.0f} tokens a "
            "second at most, all devices together."
        )


def model_costs(size: ModelSize, weights: tuple[DeviceGroup, ...]) -> ModelCosts:
    """What tokens of the language model cost; `weights` are those that a device reads in a step."""
    c = size.config
    text = [group for group in size.groups if group.part == "text"]
    routed = next(group for group in text if group.group == "routed_experts")

    def phase(active: Mapping[str, int], is_prefill: bool, num_layers: int) -> PhaseCosts:
        experts = active["routed_experts"]
        plain = sum(number for name, number in active.items() if name in _BF16_GROUPS)
        return PhaseCosts(
            fp8_flops=2 * (sum(active.values()) - experts - plain),
            bf16_flops=2 * plain,
            expert_flops=2 * experts,
            num_moe_layers=num_layers,
            attention=tuple(_attention(size, context, is_prefill) for context in _knees(size)),
        )

    num_prefilled = c.num_hidden_layers * routed.active_prefill // routed.active_decode
    return ModelCosts(
        decode=phase({g.group: g.active_decode for g in text}, False, c.num_hidden_layers),
        prefill=phase({g.group: g.active_prefill for g in text}, True, num_prefilled),
        num_experts=c.n_routed_experts,
        num_experts_per_token=c.num_experts_per_tok,
        expert_bytes=routed.size_bytes / (c.n_routed_experts * c.num_hidden_layers),
        dense_bytes=sum(
            g.size_bytes for g in weights if g.part == "text" and g.group not in _NOT_READ_WHOLE
        ),
        # FP8 with a scale for 32 channels there, bfloat16 back.
        dispatch_bytes=c.hidden_size * 33 / 32,
        combine_bytes=2 * c.hidden_size,
        engram_bytes=sum(g.read_bytes_decode for g in text if g.group == "engram_table"),
        cache_bytes_per_token=size.kv_bytes_per_token,
    )


def _attention(size: ModelSize, context: int, is_prefill: bool) -> ContextCost:
    flops = size.prefill_flops(context) if is_prefill else size.decode_flops(context)
    reads = size.decode_reads(context)
    return ContextCost(context, flops.attention + flops.index_scores, sum(reads) - reads.weights)


def _knees(size: ModelSize) -> list[int]:
    """Contexts between which every cost of attention is linear, the longest one last."""
    c = size.config
    ratios = {ratio for ratio in c.compress_ratios if ratio}
    candidates = c.candidate_topk_blocks * c.candidate_block_size
    knees = {0, c.sliding_window, c.max_position_embeddings}
    knees |= {ratio * limit for ratio in ratios for limit in (c.index_topk, candidates)}
    return sorted(knee for knee in knees if knee <= c.max_position_embeddings)


def _temporaries(size: ModelSize, plan: MeshPlan, rows: int) -> Temporaries:
    c = size.config
    tokens = max(_PREFILL_TOKENS, rows)
    heads = c.num_attention_heads * c.head_dim
    streams = 3 * c.hc_mult * c.hidden_size
    at_experts = tokens * c.num_experts_per_tok if plan.num_parts("experts") > 1 else tokens
    return Temporaries(
        activations=2 * tokens * (streams + 2 * heads),
        exchange=at_experts * (3 * c.hidden_size + 6 * c.moe_intermediate_size),
        logits=2 * 4 * rows * c.vocab_size,
    )


def _parts_ms(step: StepTime) -> dict[str, float]:
    return {
        "compute": step.compute_s * 1e3,
        "memory": step.memory_s * 1e3,
        "communication": step.communication_s * 1e3,
    }


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes figures as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def load_traffic(path: Path) -> Traffic:
    """Reads a description (`.toml`, the fields of `Traffic`) or a trace (`.jsonl`).

    A line of a trace holds `timestamp` in milliseconds, `input_length` and `output_length` in
    tokens, and may hold `hash_ids`, the digests of the blocks of its prompt; a block that an
    earlier line had is a hit.

    Raises:
        ConfigError: the file cannot be read or does not hold that.
    """
    if path.suffix != ".jsonl":
        return config_file.load(path, Traffic)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return _of_trace(path, enumerate(lines, 1))


def _of_trace(path: Path, lines: Iterable[tuple[int, str]]) -> Traffic:
    times: list[float] = []
    prompts = outputs = hits = blocks = 0
    known: set[int] = set()
    for number, line in lines:
        try:
            row: dict[str, Any] = json.loads(line)
            times.append(float(row["timestamp"]))
            prompts += int(row["input_length"])
            outputs += int(row["output_length"])
            digests = [int(digest) for digest in row.get("hash_ids", ())]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: line {number}: {error!r}; expected an object with timestamp, "
                "input_length and output_length"
            ) from None
        hits += sum(digest in known for digest in digests)
        blocks += len(digests)
        known.update(digests)
    span_s = (max(times) - min(times)) / 1e3 if times else 0.0
    if not span_s:
        raise ConfigError(f"{path}: {len(times)} requests; expected some at different times")
    count = len(times)
    ratio = min(hits / blocks, 0.999) if blocks else 0.0
    return config_file.from_mapping(
        {
            "requests_per_s": count / span_s,
            "prompt_tokens": prompts / count,
            "output_tokens": outputs / count,
            "hit_ratio": ratio,
        },
        Traffic,
        source=str(path),
    )
