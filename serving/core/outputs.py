"""What the tokens of a step do: sequences grow by them, some end, and clients are told.

This runs for every token of every sequence, so it works on columns: what is left per sequence are
the tuple of its tokens, its place in a list and the delta, each made by one call in C.
"""

from collections import deque

import numpy as np

from serving.core.request import FinishReason, TokenDelta
from serving.core.running_table import RunningTable


def add_tokens(
    table: RunningTable, rows: np.ndarray, tokens: np.ndarray, num_kept: np.ndarray
) -> tuple[list[TokenDelta], list[int]]:
    """Append what the rows sampled, up to their ends.

    Args:
        rows: [R], distinct.
        tokens: [R, W] int32; those of a row first, then -1.
        num_kept: [R], tokens of each row, at least 1.

    Returns:
        what the clients are told, one delta a row, and the rows that are finished.
    """
    is_stop = _is_stop(tokens, table.stop_tokens.take(rows, axis=0))
    ends_by_token = None
    is_kept = tokens >= 0
    if is_stop.any():
        ends_by_token = is_stop.any(axis=1)
        num_kept = np.where(ends_by_token, is_stop.argmax(axis=1) + 1, num_kept)
        is_kept = np.arange(int(tokens.shape[1])) < num_kept[:, None]
    num_tokens = table.num_tokens[rows] + num_kept
    table.num_tokens[rows] = num_tokens
    table.last_tokens[rows] = tokens[np.arange(len(rows)), num_kept - 1]
    is_over = num_tokens >= table.length_limits[rows]
    if ends_by_token is not None:
        is_over |= ends_by_token
    over = is_over.nonzero()[0].tolist()
    reasons: list[FinishReason | None] = [None] * len(rows)
    for index in over:
        is_stopped = ends_by_token is not None and ends_by_token[index]
        reasons[index] = FinishReason.STOP if is_stopped else FinishReason.LENGTH
    flat = tuple(tokens[is_kept].tolist())
    stops = num_kept.cumsum().tolist()
    added = [flat[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    deque(map(list[tuple[int, ...]].append, table.news[rows].tolist(), added), maxlen=0)
    deltas = list(
        map(
            TokenDelta,
            table.request_ids[rows].tolist(),
            added,
            reasons,
            table.num_prompt_tokens[rows].tolist(),
            table.num_cached_tokens[rows].tolist(),
        )
    )
    return deltas, rows[over].tolist()


def _is_stop(tokens: np.ndarray, stop_tokens: np.ndarray) -> np.ndarray:
    """[R, W] bool, tokens [R, W] that are among the stop tokens [R, K] of their row."""
    is_stop = tokens == stop_tokens[:, :1]
    for place in range(1, stop_tokens.shape[1]):
        is_stop |= tokens == stop_tokens[:, place : place + 1]
    return is_stop
