"""`python -m serving plan`: what a model is made of, what it keeps and what a token costs.

It works from `config.json` alone: no weights are read and nothing is allocated. All numbers come
from `deepinfer_jax.sizing`; here they get names for a machine (`ModelPlan.figures`) and a table
for a person (`ModelPlan.text`).

*Why this module may import the model*: the executor is the way to a model that runs, and this one
does not run. Its arithmetic belongs beside the layers it counts, not in serving.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_jax.checkpoint import read_config
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.precision import CacheFormat
from deepinfer_jax.safetensors_file import CheckpointError
from deepinfer_jax.sizing import DecodeReads, ModelSize, TokenFlops
from serving.config import VISION_ROLE, ServingConfig
from sharding.config_file import ConfigError

_CONTEXTS = (4096, 65536, 1048576)
"""Tokens of context for which the cost of a token is given, as far as the model reaches."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The counts of one model, and the `name` it goes by."""

    name: str
    size: ModelSize

    @classmethod
    def of(cls, directory: Path | None, cache_format: str) -> "ModelPlan":
        """Counts the model of a checkpoint directory, or the released one for None.

        `cache_format` is "kvq" or "noq".

        Raises:
            ConfigError: no such directory, or its `config.json` is missing or refused.
        """
        if directory is None:
            config, name = ModelConfig.released(), "DeepSeek-V4.1-Flash, as released"
        else:
            config, name = _config_of(directory), str(directory)
        return cls(name, ModelSize.of(config, CacheFormat(cache_format)))

    def kv_costs(self) -> tuple[float, int]:
        """Bytes of KV memory for each token of context, and for a sequence besides."""
        return self.size.kv_bytes_per_token, sum(self.size.state)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Contexts to give costs for, at least one."""
        longest = self.size.config.max_position_embeddings
        return tuple(c for c in _CONTEXTS if c <= longest) or (longest,)

    def figures(self) -> dict[str, Any]:
        """Every number, for JSON. Counts are exact; contexts are keys in decimal tokens."""
        size = self.size
        flops = {str(c): size.decode_flops(c) for c in self.contexts}
        reads = {str(c): size.decode_reads(c) for c in self.contexts}
        return {
            "model": self.name,
            "cache_format": size.cache_format.value,
            "total_bytes": size.total_bytes,
            "num_tensors": size.num_tensors,
            "params_backbone": size.num_backbone,
            "params_engram": size.num_engram,
            "params_draft": size.num_in_part("draft"),
            "params_vision": size.num_in_part("vision"),
            "params_active_decode": size.active_decode,
            "params_active_prefill": size.active_prefill,
            "params_active_draft": size.active_draft,
            "kv_bytes_per_token": _whole(size.kv_bytes_per_token),
            "state_bytes_per_sequence": size.state.without_drafts,
            "state_bytes_with_drafts": sum(size.state),
            "state_bytes": size.state._asdict(),
            "flops_per_token": {c: sum(parts) for c, parts in flops.items()},
            "flops_per_token_parts": {c: parts._asdict() for c, parts in flops.items()},
            "flops_per_prefilled_token_products": 2 * size.active_prefill,
            "replay_keep_min": size.num_kept_min,
            "flops_per_prompt_products": {
                str(c): {
                    "exact": size.prompt_products(c),
                    "replay": size.prompt_products(c, size.num_kept_min),
                }
                for c in self.contexts
            },
            "read_bytes_per_token": {c: sum(parts) for c, parts in reads.items()},
            "read_bytes_per_token_parts": {c: parts._asdict() for c, parts in reads.items()},
            "groups": [asdict(group) for group in size.groups],
        }

    def text(self) -> str:
        """The same as tables, some lines of text."""
        parts = (self._title(), self._weights(), self._parameters(), self._memory(), self._costs())
        return "\n\n".join(parts)

    def _title(self) -> str:
        c = self.size.config
        return (
            f"{self.name}: {c.num_hidden_layers} layers, {c.n_routed_experts} experts of which a "
            f"token uses {c.num_experts_per_tok}, context up to {c.max_position_embeddings:,}"
        )

    def _weights(self) -> str:
        size = self.size
        rows = [
            (
                g.part if g.part == g.group else f"{g.part} {_words(g.group)}",
                f"{g.num_tensors:,}",
                _count(g.num_parameters),
                scaled(g.size_bytes, "B"),
                f"{100 * g.size_bytes / size.total_bytes:.1f} %",
            )
            for g in size.groups
        ]
        num_parameters = _count(sum(g.num_parameters for g in size.groups))
        total = scaled(size.total_bytes, "B")
        rows.append(("all", f"{size.num_tensors:,}", num_parameters, total, "100 %"))
        weights = table(("weights", "tensors", "parameters", "bytes", "share"), rows)
        return f"{weights}\nThe checkpoint holds {size.total_bytes:,} bytes in all."

    def _parameters(self) -> str:
        size = self.size
        rows = [
            ("backbone", _count(size.num_backbone)),
            ("  active per decoded token", _count(size.active_decode)),
            ("  active per prefilled token", _count(size.active_prefill)),
            ("Engram tables, read by row", _count(size.num_engram)),
            ("draft module", _count(size.num_in_part("draft"))),
            ("  active per drafted position", _count(size.active_draft)),
            ("image encoder", _count(size.num_in_part("vision"))),
        ]
        return table(("parameters", "count"), rows)

    def _memory(self) -> str:
        size, state = self.size, self.size.state
        per_token, longest = size.kv_bytes_per_token, size.config.max_position_embeddings
        rows = [
            ("growing, per token", f"{_whole(per_token):,}"),
            (f"growing, at {longest:,} tokens", f"{_whole(per_token * longest):,}"),
            ("state", f"{state.without_drafts:,}"),
            *((f"  {_words(name)}", f"{value:,}") for name, value in state._asdict().items()),
            ("state with drafts", f"{sum(state):,}"),
        ]
        title = f"cache of a sequence ({size.cache_format.value})"
        return table((title, "bytes"), rows)

    def _costs(self) -> str:
        flops = {context: self.size.decode_flops(context) for context in self.contexts}
        reads = {context: self.size.decode_reads(context) for context in self.contexts}
        return (
            f"{_cost_table('operations of a decoded token', flops, 'FLOP')}\n\n"
            f"{_cost_table('read for it, alone in a step', reads, 'B')}\n\n{self._prompts()}"
        )

    def _prompts(self) -> str:
        """What prompts cost, with and without bounded replay."""
        size, kept = self.size, self.size.num_kept_min
        rows = [
            (
                f"  of {context:,}",
                scaled(size.prompt_products(context), "FLOP"),
                scaled(size.prompt_products(context, kept), "FLOP"),
            )
            for context in self.contexts
        ]
        header = ("products of a prompt", "exact", f"replay of {kept}")
        return (
            f"{table(header, rows)}\n"
            f"A token before the replayed ones costs {scaled(2 * size.active_prefill, 'FLOP')}."
        )


def _cost_table(title: str, costs: Mapping[int, TokenFlops | DecodeReads], unit: str) -> str:
    """One row per context, one column per part and their sum."""
    rows = [
        (f"  at {context:,}", *(scaled(part, unit) for part in (*parts, sum(parts))))
        for context, parts in costs.items()
    ]
    names = next(iter(costs.values()))._fields
    return table((title, *map(_words, names), "all"), rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _count(number: int) -> str:
    for name, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return str(number)


def scaled(number: int, unit: str) -> str:
    """A number of bytes or operations in three digits or so, such as "5.3 GB"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {prefix}{unit}"
    return f"{number} {unit}"


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def check_roles(config: ServingConfig) -> None:
    """Raise `ConfigError` if a cluster has a role that its model cannot play."""
    names = [name for name, node in config.cluster.nodes.items() if node.role == VISION_ROLE]
    if names and _config_of(config.model.directory).vision is None:
        raise ConfigError(
            f"cluster.nodes.{names[0]} has the role {VISION_ROLE!r}, and {config.model.directory} "
            "has no image encoder (no vision_config in config.json); expected a model that takes "
            "images, or no such node"
        )


def _config_of(directory: Path) -> ModelConfig:
    try:
        return read_config(directory)
    except CheckpointError as error:
        raise ConfigError(" ".join(str(error).split())) from error
