"""Which layer reads whose compressed entries, index list and candidates.

The config names sources; this module turns them into one record per layer, so that the forward
pass asks a record instead of comparing lists. The rules:

* the KV source of a compressed layer is the largest member of `kv_source_layer_ids` not above
  it, and likewise for the index source;
* a layer that is both kinds of source is *full*, only an index source *reindex*, neither *reuse*;
  a layer of ratio 0 has no compressed branch and is *window*;
* the candidate source makes candidate blocks while it selects, and reindex layers select among
  them.

A map that contradicts itself (entries of another ratio, an index list made for other entries,
a reindex layer without candidates) is refused, since it would run and answer nonsense.
"""

import enum
from dataclasses import dataclass

from deepinfer_jax.config import ModelConfig, ModelConfigError


class LayerKind(enum.Enum):
    """What the compressed branch of a layer does."""

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class LayerTopology:
    """One text layer.

    Attributes:
        layer_index: number of the layer.
        kind: what its compressed branch does.
        ratio: tokens per compressed entry; 0 for a window layer.
        kv_source: layer whose compressed entries it attends to; None for a window layer.
        index_source: layer whose index list it uses; None for a window layer.
        makes_candidates: it makes the candidate blocks while selecting.
        uses_candidates: it selects only inside the candidate blocks.
        is_encoder: it lies before the last KV source, so every prompt token must pass it.
        engram_index: position in `engram_layer_ids`; None without an Engram.
    """

    layer_index: int
    kind: LayerKind
    ratio: int
    kv_source: int | None
    index_source: int | None
    makes_candidates: bool
    uses_candidates: bool
    is_encoder: bool
    engram_index: int | None

    @property
    def makes_entries(self) -> bool:
        """It has a compressor and index keys of its own."""
        return self.kind is LayerKind.FULL

    @property
    def makes_index(self) -> bool:
        """It has index queries of its own."""
        return self.kind in (LayerKind.FULL, LayerKind.REINDEX)


@dataclass(frozen=True, slots=True)
class Topology:
    """The records of all text layers, in order."""

    layers: tuple[LayerTopology, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> "Topology":
        """Works out the map of a config.

        Raises:
            ModelConfigError: the map contradicts itself; names the layer and the lists.
        """
        layers = tuple(_layer(config, index) for index in range(config.num_hidden_layers))
        _check_candidates(config, layers)
        return cls(layers)

    @property
    def num_encoder_layers(self) -> int:
        """Layers before the last KV source; all of them when nothing is compressed."""
        return sum(layer.is_encoder for layer in self.layers)

    @property
    def parts(self) -> tuple[range, ...]:
        """The layers in runs, each of which reads the long KV of one layer at most, its first."""
        num_layers = len(self.layers)
        sources = [layer.layer_index for layer in self.layers if layer.makes_entries]
        starts = sorted({0, *sources})
        return tuple(
            range(start, stop)
            for start, stop in zip(starts, [*starts[1:], num_layers], strict=True)
        )

    @property
    def part_of_group(self) -> tuple[int, ...]:
        """For each layer that owns long KV, in order, the number of its part."""
        numbered = enumerate(self.parts)
        return tuple(n for n, part in numbered if self.layers[part.start].makes_entries)


def _layer(config: ModelConfig, index: int) -> LayerTopology:
    ratio = config.compress_ratios[index]
    is_kv_source = index in config.kv_source_layer_ids
    is_index_source = index in config.index_source_layer_ids
    if ratio == 0:
        kind, kv_source, index_source = LayerKind.WINDOW, None, None
        if is_kv_source or is_index_source:
            name = "kv_source_layer_ids" if is_kv_source else "index_source_layer_ids"
            raise ModelConfigError(
                f"{name} names layer {index}, whose compress ratio is 0; "
                "expected only layers of ratio 1 or 2"
            )
    else:
        kv_source = _source(config, index, "kv_source_layer_ids")
        index_source = _source(config, index, "index_source_layer_ids")
        if index_source < kv_source:
            raise ModelConfigError(
                f"layer {index} would use the index list of layer {index_source} on the entries "
                f"of layer {kv_source}; expected every member of kv_source_layer_ids in "
                "index_source_layer_ids too"
            )
        kind = LayerKind.REINDEX if is_index_source else LayerKind.REUSE
        kind = LayerKind.FULL if is_kv_source else kind
    engrams = config.engram_layer_ids
    return LayerTopology(
        layer_index=index,
        kind=kind,
        ratio=ratio,
        kv_source=kv_source,
        index_source=index_source,
        makes_candidates=kind is LayerKind.FULL and index == config.candidate_source_layer_id,
        uses_candidates=kind is LayerKind.REINDEX,
        is_encoder=index < max(config.kv_source_layer_ids, default=config.num_hidden_layers),
        engram_index=engrams.index(index) if index in engrams else None,
    )


def _source(config: ModelConfig, index: int, name: str) -> int:
    """The largest member of the list `name` not above `index`, with the same ratio."""
    source = max((s for s in getattr(config, name) if s <= index), default=None)
    ratio = config.compress_ratios[index]
    if source is None:
        raise ModelConfigError(
            f"layer {index} has compress ratio {ratio} but no source at or below it in {name} "
            f"{list(getattr(config, name))}"
        )
    if config.compress_ratios[source] != ratio:
        raise ModelConfigError(
            f"layer {index} has compress ratio {ratio} and takes its source, layer {source} of "
            f"{name}, which has ratio {config.compress_ratios[source]}; expected equal ratios"
        )
    return source


def _check_candidates(config: ModelConfig, layers: tuple[LayerTopology, ...]) -> None:
    source = config.candidate_source_layer_id
    if not any(layer.kind is LayerKind.REINDEX for layer in layers):
        return
    if not (0 <= source < len(layers) and layers[source].kind is LayerKind.FULL):
        raise ModelConfigError(
            f"candidate_source_layer_id is {source}; expected a layer that is in both "
            "kv_source_layer_ids and index_source_layer_ids"
        )
    for layer in layers:
        if layer.uses_candidates and layer.kv_source != source:
            raise ModelConfigError(
                f"layer {layer.layer_index} selects among the entries of layer {layer.kv_source} "
                f"but the candidates come from layer {source} (candidate_source_layer_id)"
            )
