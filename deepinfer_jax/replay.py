"""What bounded replay of prompts asks of a model (`batch.Replay` says what it does)."""

from deepinfer_jax.cache import ROLLBACK_MAX
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.topology import Topology


class ReplayError(ValueError):
    """Bounded replay that a model cannot run."""


def check_replay(
    config: ModelConfig, topology: Topology, num_kept: int, *, drops_tokens: bool
) -> None:
    """Whether a model can run its upper layers on the last `num_kept` tokens of a prompt alone.

    What is generated sees whole windows without a mask, also after rows were taken back; hence
    the least `num_kept`.

    Args:
        drops_tokens: the other tokens are left out, and not only hidden.

    Raises:
        ReplayError: it cannot; says why.
    """
    if topology.num_encoder_layers == len(topology.layers):
        raise ReplayError(
            "the model has no layer that makes compressed entries (kv_source_layer_ids is empty), "
            "so every token of a prompt must pass all of its layers; expected a model with such "
            "layers, or no replay"
        )
    least = config.sliding_window + ROLLBACK_MAX
    if num_kept < least:
        raise ReplayError(
            f"replay keeps the last {num_kept} tokens of a prompt; expected at least {least}: a "
            f"window of {config.sliding_window} and the {ROLLBACK_MAX} that a step may take back"
        )
    check_upper_layers(topology, drops_tokens=drops_tokens)


def num_replayed(config: ModelConfig, topology: Topology) -> int:
    """How many tokens before a block boundary make the state at it anew, exactly.

    Compressed entries of the whole past being there, an output of a layer depends on the window
    before it in the layer below, and so on down to the embeddings, so what was wrong at the first
    token is forgotten after a window less one for each layer. Only the layers below the last KV
    source count: those above leave nothing behind that a later prompt reads. The first tokens lack
    the n-grams that reach behind them.
    """
    per_layer = config.sliding_window - 1
    return per_layer * topology.num_encoder_layers + config.engram_max_ngram_size - 1


def check_upper_layers(topology: Topology, *, drops_tokens: bool) -> None:
    """The tail alone cannot pass an Engram, whose n-grams were formed for all tokens.

    Raises:
        ReplayError: a layer from the last KV source up has one.
    """
    upper = topology.layers[topology.num_encoder_layers :]
    with_engram = [layer.layer_index for layer in upper if layer.engram_index is not None]
    if drops_tokens and with_engram:
        raise ReplayError(
            f"layers {with_engram} have an Engram and lie above the last KV source; a prompt's "
            "tail cannot run alone there; expected replay that masks and does not leave out"
        )
