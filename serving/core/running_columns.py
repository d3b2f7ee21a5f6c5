"""What every step reads and writes of every running sequence, as numpy columns indexed by row.

Memory is taken by rank. With one owner (`Request.cache_owner`, a tenant) it is the rank of the
sequence: by urgency, then by admission. With several, the sequences of each are put in that order
and owners take turns: the first of each owner come before the second of any, and among those at
the same place the one that was admitted first. So a tenant's second request loses its memory before
another's only one, however urgent it calls itself, and urgency is of use against one's own only.

All end then too: the first in rank is some owner's most urgent one and the oldest of these, and it
is outranked only by an older one, of which there are not many, or by more urgent ones of its own
owner, which promotion bounds (`waiting_queue.py`).
"""

from collections import Counter

import numpy as np

from serving.core.sequence import Sequence

NO_SEQUENCE = -1
_NO_TOKEN = -2
"""Not -1, which stands in results where there is no token."""


class RunningColumns:
    """One entry per row; those of empty rows have no meaning, except `sequence_ids` and `ranks`.

    Attributes:
        sequence_ids: [S] int64, -1 where no sequence runs.
        ranks: [S] int64, whose memory goes first: that with the largest; -1 where no sequence runs.
        own_ranks: [S] int64, `Sequence.rank`, that among those of the same owner.
        owners: [S] objects, `Request.cache_owner`.
        num_tokens: [S] int32, tokens known, prompt and output.
        num_scheduled: [S] int32, tokens whose KV is written, or will be by a step in flight; they
            need not be known. If drafts are in flight, the most that it may be.
        num_in_flight: [S] int32, steps in flight that contain the row; each keeps a token at least.
        num_computed: [S] int32, tokens whose KV is written, and that stay.
        num_computed_before: [S] int32, the same before the last settled step of the row.
        num_named: [S] int32, blocks from the first on that others may share.
        cuts: [S, 3] int32, positions at which a chunk of the prompt ends, ascending from 1 on.
        tail_starts: [S] int32, first position that passes the upper layers; 0 for all.
        visible_starts, entry_starts: [S] int32, where a replay of the row began, and up to where
            its blocks were there (`core/replay.py`); 0 for a row that replays nothing.
        length_limits: [S] int32, number of tokens at which the sequence ends.
        last_tokens: [S] int32, the newest known token, of decoding rows.
        last_steps: [S] int64, newest step that contains the row; -1 before the first.
        num_blocks: [S] int32, blocks held.
        block_tables: [S, B] int32, the blocks in order of position, then zeros.
        stop_tokens: [S, K] int32, tokens that end the sequence, then -2.
        temperatures: [S] float32.   top_ks: [S] int32.   top_ps: [S] float32.
        seeds: [S] int64.
        confidences, confidences_before: [S, N] float32, of the newest drafts that the host has
            heard of and of those before them.
        num_rounds: [S] int32, how often the host has heard of drafts.
        is_controlled: [S] bool, rows whose sequence has controls.
        is_stepwise: [S] bool, those of them whose controls go by all tokens before the next one.
        num_usable_drafts: [S] int32, drafts that may be verified: all of them, or those that the
            grammar of the row has to be asked about.
        sequences: the sequence of each row, None where there is none.
        request_ids, news: [S] objects, where the tokens of a step go: `request.request_id` and
            `news` of the sequence.
        num_prompt_tokens, num_cached_tokens: [S] int32, for deltas too.
    """

    def __init__(self, num_slots: int, context_blocks_max: int, num_drafts: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.request_ids = np.full(num_slots, None, object)
        self.news = np.full(num_slots, None, object)
        self.num_prompt_tokens = np.zeros(num_slots, np.int32)
        self.num_cached_tokens = np.zeros(num_slots, np.int32)
        self.sequence_ids = np.full(num_slots, NO_SEQUENCE, np.int64)
        self.ranks = np.full(num_slots, NO_SEQUENCE, np.int64)
        self.own_ranks = np.full(num_slots, NO_SEQUENCE, np.int64)
        self.owners = np.full(num_slots, None, object)
        self._num_owned = Counter[str]()
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.num_scheduled = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_computed_before = np.zeros(num_slots, np.int32)
        self.num_in_flight = np.zeros(num_slots, np.int32)
        self.num_named = np.zeros(num_slots, np.int32)
        self.cuts = np.zeros((num_slots, 3), np.int32)
        self.tail_starts = np.zeros(num_slots, np.int32)
        self.visible_starts = np.zeros(num_slots, np.int32)
        self.entry_starts = np.zeros(num_slots, np.int32)
        self.length_limits = np.zeros(num_slots, np.int32)
        self.last_tokens = np.zeros(num_slots, np.int32)
        self.last_steps = np.full(num_slots, -1, np.int64)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.block_tables = np.zeros((num_slots, context_blocks_max), np.int32)
        self.stop_tokens = np.full((num_slots, 1), _NO_TOKEN, np.int32)
        self.temperatures = np.zeros(num_slots, np.float32)
        self.top_ks = np.zeros(num_slots, np.int32)
        self.top_ps = np.ones(num_slots, np.float32)
        self.seeds = np.zeros(num_slots, np.int64)
        self.is_controlled = np.zeros(num_slots, bool)
        self.is_stepwise = np.zeros(num_slots, bool)
        self.num_usable_drafts = np.zeros(num_slots, np.int32)
        self.confidences = np.zeros((num_slots, num_drafts), np.float32)
        self.confidences_before = np.zeros((num_slots, num_drafts), np.float32)
        self.num_rounds = np.zeros(num_slots, np.int32)

    def set_stop_tokens(self, row: int, stop_token_ids: tuple[int, ...]) -> None:
        """The tokens that end the sequence of a row."""
        num_missing = len(stop_token_ids) - self.stop_tokens.shape[1]
        if num_missing > 0:
            self.stop_tokens = np.pad(
                self.stop_tokens, ((0, 0), (0, num_missing)), constant_values=_NO_TOKEN
            )
        self.stop_tokens[row] = _NO_TOKEN
        self.stop_tokens[row, : len(stop_token_ids)] = stop_token_ids

    def rank(self, row: int, sequence: Sequence) -> None:
        """Give a sequence that comes to a row its rank."""
        owner = sequence.request.cache_owner
        self.sequence_ids[row], self.owners[row] = sequence.sequence_id, owner
        self.ranks[row] = self.own_ranks[row] = sequence.rank
        self._num_owned[owner] += 1
        if len(self._num_owned) > 1:
            self._rank_anew()

    def num_owned(self, owner: str) -> int:
        """Rows with a sequence of this owner."""
        return self._num_owned[owner]

    def unrank(self, row: int) -> None:
        """The sequence of a row leaves it."""
        owner = self.owners[row]
        self.sequence_ids[row] = self.ranks[row] = self.own_ranks[row] = NO_SEQUENCE
        self.owners[row] = None
        self._num_owned[owner] -= 1
        if not self._num_owned[owner]:
            del self._num_owned[owner]
            self._rank_anew()
        elif len(self._num_owned) > 1:
            self._rank_anew()

    def _rank_anew(self) -> None:
        rows = (self.sequence_ids != NO_SEQUENCE).nonzero()[0]
        if len(self._num_owned) == 1:
            self.ranks[rows] = self.own_ranks[rows]
        elif len(self._num_owned) > 1:
            ids = self.sequence_ids[rows]
            self.ranks[rows] = fair_ranks(self.owners[rows], self.own_ranks[rows], ids)


def fair_ranks(owners: np.ndarray, own_ranks: np.ndarray, sequence_ids: np.ndarray) -> np.ndarray:
    """[N] int64 from 0 on: the order in which owners [N] take turns, each with its first in
    `own_ranks` [N] first; among those in the same turn by `sequence_ids` [N].
    """
    _, numbers = np.unique(owners.astype(str), return_inverse=True)
    by_owner = np.lexsort((own_ranks, numbers))
    places = np.arange(len(owners))
    is_first = np.diff(numbers[by_owner], prepend=-1) != 0
    turns = np.empty_like(places)
    turns[by_owner] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    ranks = np.empty_like(places)
    ranks[np.lexsort((sequence_ids, turns))] = places
    return ranks
