"""How long a step takes at least: work over peak speed, the larger of computing and reading memory,
with the exchange between devices beside or behind it.

Plain numbers in, plain numbers out, so planner and simulator use the same model: `ModelCosts`
says what a token costs, `Layout` how the model lies on devices, `Hardware` what those can do, and
`StepRoofline` joins the three. Its times are lower bounds: every peak is taken as reached, experts
as balanced up to `moe_lb`, and nothing is added for launches or waiting.

A step with two micro-batches reads the weights twice and hides the exchange of one half behind the
work of the other; with one micro-batch the exchange is added in full.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from sharding.hardware import Hardware

_TERMS = ("compute", "memory", "communication")


@dataclass(frozen=True, slots=True)
class ContextCost:
    """What a token costs in attention when its context, itself included, is `context` tokens.

    Attributes:
        flops: scores and sums, 2 per multiply-add.
        read_bytes: of the cache.
    """

    context: int
    flops: float
    read_bytes: float


@dataclass(frozen=True, slots=True)
class PhaseCosts:
    """What one token costs in one phase, prefill or decode.

    Attributes:
        fp8_flops: products with FP8 and FP4 weights but for routed experts.
        bf16_flops: products with unquantised weights.
        expert_flops: products with routed experts.
        num_moe_layers: layers whose experts a token passes.
        attention: costs by rising context; between two of them costs are linear.
    """

    fp8_flops: float
    bf16_flops: float
    expert_flops: float
    num_moe_layers: int
    attention: tuple[ContextCost, ...]

    def at(self, context: float) -> ContextCost:
        """Attention at any context; beyond the last point it stays what it is there."""
        points = self.attention
        index = bisect.bisect_right([point.context for point in points], context)
        if index in (0, len(points)):
            return points[max(index - 1, 0)]
        low, high = points[index - 1], points[index]
        part = (context - low.context) / (high.context - low.context)
        return ContextCost(
            round(context),
            low.flops + part * (high.flops - low.flops),
            low.read_bytes + part * (high.read_bytes - low.read_bytes),
        )


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a model costs, without regard to devices.

    Attributes:
        decode, prefill: per token.
        num_experts, num_experts_per_token: routed experts of a layer, and how many a token uses.
        expert_bytes: weights of one routed expert of one layer.
        dense_bytes: weights that every step reads whole.
        dispatch_bytes, combine_bytes: what a token sends to a device that has one of its experts,
            and what that device sends back, per layer.
        engram_bytes: rows of Engram tables that a token reads.
        cache_bytes_per_token: by which a cache grows per token of context.
    """

    decode: PhaseCosts
    prefill: PhaseCosts
    num_experts: int
    num_experts_per_token: int
    expert_bytes: float
    dense_bytes: float
    dispatch_bytes: float
    combine_bytes: float
    engram_bytes: float
    cache_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model lies on devices.

    Attributes:
        num_expert_devices: devices among which the experts of a layer are divided.
        expert_slots: experts of a layer on one device, replicas included.
        num_engram_devices: devices among which Engram tables are divided, by rows or channels.
        is_engram_on_host: rows come from the memory of the host instead.
        num_context_devices: devices that share the tokens of one prompt.
        micro_batches: 1 or 2.
        moe_lb: largest over mean load of the devices' experts.
    """

    num_expert_devices: int
    expert_slots: float
    num_engram_devices: int = 1
    is_engram_on_host: bool = False
    num_context_devices: int = 1
    micro_batches: int = 1
    moe_lb: float = 1.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and of its parts were each alone.

    Attributes:
        total_s: of the step.
        compute_s, memory_s, communication_s: of its parts.
        sent_bytes: by one device, all layers.
    """

    total_s: float
    compute_s: float
    memory_s: float
    communication_s: float
    sent_bytes: float

    @property
    def bound_by(self) -> str:
        """The longest part: "compute", "memory" or "communication"."""
        parts: Mapping[str, float] = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "communication": self.communication_s,
        }
        return max(_TERMS, key=lambda term: parts[term])


@dataclass(frozen=True, slots=True)
class StepRoofline:
    """Step times of one model on one kind of device in one layout."""

    costs: ModelCosts
    layout: Layout
    hardware: Hardware

    def decode(self, num_tokens: float, context: float) -> StepTime:
        """A decode step of `num_tokens` tokens on each device, drafts included, at one context."""
        return self._step(self.costs.decode, num_tokens, context, 1.0)

    def prefill(self, num_tokens: float, num_before: float = 0) -> StepTime:
        """A prefill step of `num_tokens` tokens on each device, the next ones of prompts of which
        `num_before` tokens each are there already.

        With context parallelism the tokens of a device are its share of the prompt.
        """
        chunk = num_tokens * self.layout.num_context_devices
        # Index keys and entries are read once by a tile of queries rather than by each.
        return self._step(self.costs.prefill, num_tokens, num_before + chunk / 2, 1 / 64)

    def _step(
        self, phase: PhaseCosts, num_tokens: float, context: float, read_share: float
    ) -> StepTime:
        costs, layout, hardware = self.costs, self.layout, self.hardware
        attention = phase.at(context)
        expert_flops = phase.expert_flops * layout.moe_lb
        compute_s = num_tokens * (
            (phase.fp8_flops + expert_flops) / hardware.fp8_flops_per_s
            + (phase.bf16_flops + attention.flops) / hardware.bf16_flops_per_s
        )
        # Each of the micro-batches reads the weights that its own tokens need.
        tokens_at_once = num_tokens * layout.num_expert_devices / layout.micro_batches
        is_read = 1 - (1 - costs.num_experts_per_token / costs.num_experts) ** tokens_at_once
        expert_bytes = phase.num_moe_layers * layout.expert_slots * is_read * costs.expert_bytes
        weight_bytes = layout.micro_batches * (costs.dense_bytes + expert_bytes)
        cache_bytes = num_tokens * attention.read_bytes * read_share
        memory_s = (weight_bytes + cache_bytes) / hardware.memory_bytes_per_s
        sent, communication_s = self._exchange(phase, num_tokens)
        work_s = max(compute_s, memory_s)
        total_s = work_s + communication_s
        if layout.micro_batches > 1:
            total_s = max(work_s, communication_s)
        return StepTime(total_s, compute_s, memory_s, communication_s, sent)

    def _exchange(self, phase: PhaseCosts, num_tokens: float) -> tuple[float, float]:
        """Bytes that a device sends in a step, and the seconds that its slower link needs."""
        costs, layout, hardware = self.costs, self.layout, self.hardware
        num_devices = layout.num_expert_devices
        near = min(hardware.devices_per_node, num_devices)
        # A token goes once to every device that has some of its experts, all equally likely.
        reached = num_devices * (1 - (1 - 1 / num_devices) ** costs.num_experts_per_token)
        per_layer = reached * (costs.dispatch_bytes + costs.combine_bytes)
        expert_bytes = num_tokens * phase.num_moe_layers * per_layer
        in_node = expert_bytes * (near - 1) / num_devices
        network = expert_bytes * (num_devices - near) / num_devices
        engram = num_tokens * costs.engram_bytes
        host_s = engram / hardware.host_bytes_per_s if layout.is_engram_on_host else 0.0
        if not layout.is_engram_on_host:
            rows = layout.num_engram_devices
            near_rows = min(hardware.devices_per_node, rows)
            in_node += engram * (near_rows - 1) / rows
            network += engram * (rows - near_rows) / rows
        shared = layout.num_context_devices
        if shared > 1:
            # What a device makes of its share of a prompt goes to all others that share it.
            made = num_tokens * costs.cache_bytes_per_token
            near_ranks = min(hardware.devices_per_node, shared)
            in_node += made * (near_ranks - 1)
            network += made * (shared - near_ranks)
        slower = max(in_node / hardware.node_bytes_per_s, network / hardware.network_bytes_per_s)
        return in_node + network, max(slower, host_s)
