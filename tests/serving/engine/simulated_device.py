"""A device whose tokens can be worked out by hand.

`SimulatedDevice` keeps a KV pool that holds the tokens themselves and a state slot that holds a
digest of the tokens it has seen. Each step reads its context back through the block tables and
compares it with the slot, so a wrong block, slot, start, order or a block reused too early shows
as an error or as a wrong token. An image counts as one large token for each of its places.
Tokens also depend on a second digest, that of the sequence's tail (`core/replay.py`), which a slot
has from the start of the tail on; an exact step may not look back behind it.
`expected_tokens` gives the tokens of a request without any of it.
"""

from collections import deque

import numpy as np

from serving.core.buckets import BucketTable, StepKind
from serving.core.kv_transfer import KVRead, KVTransfer
from serving.core.request import Request, RequestImage
from serving.core.step_plan import LAST_SAMPLED, StepPlan, StepResult
from serving.engine.engine import EngineLimits
from serving.engine.packing import IMAGE_FEATURE, PackedStep, pack

VOCAB_SIZE = 23
EOS = 0
_MODULUS = 2**61 - 1
_EMPTY = 7
_IMAGE_VALUES = 10_000
ROLLBACK_MAX = 6
"""How many tokens later than at its end the state of a prefix can still be copied."""
WINDOW = 3
"""Tokens that an upper layer sees, itself included."""
_NO_TAIL = -1


def _extend(digest: int, token: int) -> int:
    return (digest * 1_000_003 + token + 1) % _MODULUS


def _sample(
    digest: int, position: int, sampling: tuple[float, int, float, int], tail: int | None = None
) -> int:
    """The token after those with this digest; `tail` is that of their tail, if it is another."""
    temperature, top_k, top_p, seed = sampling
    digest += 0 if tail is None else 3 * (tail - digest)
    settings = round(temperature * 1000) + 31 * top_k + round(top_p * 1000) + seed
    return (digest + position * 7919 + settings) // 3 % VOCAB_SIZE


def make_image(start: int, num_tokens: int, name: int = 0) -> RequestImage:
    """An image of no content; `name` tells it from others."""
    pixels = np.zeros((1, 588), np.uint8)
    return RequestImage(start, num_tokens, 1, 1, name.to_bytes(2), pixels)


def features_of(image: RequestImage) -> np.ndarray:
    """What a vision worker gives for an image."""
    rows = np.arange(image.num_tokens, dtype=np.uint8)[:, None]
    return np.tile(rows + np.frombuffer(image.digest, np.uint8).sum(dtype=np.uint8), 4)


def _image_values(image: RequestImage) -> list[int]:
    """What stands for an image's tokens: no token id, and another number at each place."""
    first = _IMAGE_VALUES * (1 + int.from_bytes(image.digest[:2]))
    return list(range(first, first + image.num_tokens))


def expected_tokens(request: Request, seed: int, length_max: int, tail_start: int = 0) -> list[int]:
    """What the device must generate for a request that nothing disturbs."""
    wanted = request.sampling
    sampling = (wanted.temperature, wanted.top_k, wanted.top_p, seed)
    stops = set(wanted.stop_token_ids) | (set() if wanted.ignore_eos else {EOS})
    digest = tail = _EMPTY
    length = len(request.prompt_token_ids)
    prompt = list(request.prompt_token_ids)
    for image in request.images:
        prompt[image.start : image.stop] = _image_values(image)
    for token in prompt:
        digest = _extend(digest, token)
    for token in prompt[tail_start:]:
        tail = _extend(tail, token)
    output: list[int] = []
    while True:
        output.append(_sample(digest, length, sampling, tail))
        digest, tail, length = _extend(digest, output[-1]), _extend(tail, output[-1]), length + 1
        if output[-1] in stops or len(output) == wanted.max_tokens or length == length_max:
            return output


class SimulatedDevice:
    """An `Executor` that runs packed steps against a pool of tokens."""

    def __init__(self, limits: EngineLimits, buckets: BucketTable) -> None:
        self._buckets = set(buckets)
        self._block_size = limits.block_size
        self._pool = np.full((limits.num_blocks, limits.block_size), -1, np.int64)
        # A slot remembers what it had seen at its last few lengths, as rings on a device do.
        # Number and digest of its tokens, then start and digest of its tail.
        self._slots = np.full((limits.num_slots + limits.num_snapshots, ROLLBACK_MAX + 1, 4), -1)
        self._replay = limits.replay
        self.num_left_out = self.num_references = 0
        # Images that steps had to encode, and those that came as features.
        self.num_encoded = self.num_given = 0
        self.tails: list[int | None] = []
        self._sampled = np.full(limits.num_slots, -1)
        self._num_drafts = limits.num_drafts
        self._lengths = np.zeros(limits.num_slots, np.int64)
        self._replays = Replays(0 if limits.replay is None else limits.replay.num_replayed)
        self.num_replayed = 0
        self._drafts = np.full((limits.num_slots, limits.num_drafts), -1)
        self.in_flight: deque[StepPlan] = deque()
        self.kinds: list[StepKind] = []
        # Transfers, with the number of steps that were submitted before each.
        self._transfers: deque[tuple[int, KVTransfer]] = deque()
        self._reads: deque[KVRead] = deque()
        self._num_collected = 0

    def move(self, transfer: KVTransfer) -> None:
        self._transfers.append((self._num_collected + len(self.in_flight), transfer))

    def collect_read(self) -> KVRead:
        self._run_transfers()
        return self._reads.popleft()

    def _run_transfers(self) -> None:
        """Those that stand before the next step."""
        while self._transfers and self._transfers[0][0] <= self._num_collected:
            _, t = self._transfers.popleft()
            if t.is_reading:
                blocks = self._pool[t.read_blocks].view(np.uint8)
                states = self._slots[t.read_slots].reshape(-1, self._slots[0].size).view(np.uint8)
                # Two groups, as of a model with two layers that own KV.
                groups = tuple(half.copy() for half in np.split(blocks, 2, axis=1))
                self._reads.append(KVRead(t.transfer_id, groups, states.copy()))
            if len(t.write_blocks):
                lengths = {len(group) for group in t.write_groups}
                assert t.write_blocks.all() and lengths == {len(t.write_blocks)}
                data = np.ascontiguousarray(np.concatenate(t.write_groups, axis=1))
                self._pool[t.write_blocks] = data.view(np.int64)
            for slot, state in zip(t.write_slots.tolist(), t.write_states, strict=True):
                self._slots[slot] = state.view(np.int64).reshape(self._slots[slot].shape)
                self._lengths[slot : slot + 1] = -1

    def submit(self, plan: StepPlan) -> None:
        assert (plan.kind, plan.bucket) in self._buckets, f"{plan.bucket} is not compiled"
        self._check_tail(plan)
        self.in_flight.append(plan)
        self.kinds.append(plan.kind)

    def collect(self) -> StepResult:
        self._run_transfers()
        plan = self.in_flight.popleft()
        self._num_collected += 1
        for source, destination in plan.restores.tolist():
            self._slots[destination] = self._slots[source]
        result = self._run(pack(plan), plan)
        for source, destination in plan.snapshots.tolist():
            self._slots[destination] = self._slots[source]
        return result

    def _check_tail(self, plan: StepPlan) -> None:
        """The tail of a step has a compiled size that holds it."""
        self.tails.append(None if plan.tail is None else plan.tail.num_tokens)
        if plan.tail is not None:
            assert plan.kind is StepKind.PREFILL and self._replay is not None
            assert plan.tail.num_tokens in self._replay.sizes(plan.bucket)
            positions = np.repeat(plan.starts - np.cumsum(plan.num_tokens), plan.num_tokens)
            positions += np.repeat(plan.num_tokens, plan.num_tokens)
            positions += np.arange(len(positions))
            in_tail = positions >= np.repeat(plan.tail.starts, plan.num_tokens)
            self.num_left_out += int((~in_tail).sum())
            assert not plan.tail.num_tokens or in_tail.sum() <= plan.tail.num_tokens

    def _run(self, step: PackedStep, plan: StepPlan) -> StepResult:
        """Tokens that the rows in use sample, and how sure the device is of its next drafts."""
        sampled: list[list[int]] = []
        for place in plan.images:
            self.num_encoded += place.features is None
            if place.features is not None:
                self.num_given += 1
                np.testing.assert_array_equal(place.features, features_of(place.image))
            values = _image_values(place.image)
            there = step.token_ids[place.token_index :][: len(values)]
            assert (there == IMAGE_FEATURE).all(), f"{place} does not stand at its place"
            there[:] = values
        assert (step.token_ids != IMAGE_FEATURE).all(), "features of no image are wanted"
        assert (step.row_index[step.num_tokens_total :] == step.bucket.num_rows).all()
        assert not step.slots[step.num_rows :].any()
        for row in range(step.num_rows):
            tokens = step.token_ids[step.row_index == row].tolist()
            assert len(tokens) == step.num_tokens[row] > 0
            slot = int(step.slots[row])
            start = int(step.starts[row])
            if tokens[0] == LAST_SAMPLED:
                tokens[0] = int(self._sampled[slot])
                self.num_references += 1
                assert self._lengths[slot] <= start, "the row is longer than the host thinks"
                start = int(self._lengths[slot])
            if step.kind is StepKind.DECODE:
                assert self._lengths[slot] in (start, -1), "the host has lost count"
                tokens[1:] = self._drafts[slot, : len(tokens) - 1].tolist()
            per_token = self._run_row(step, plan, row, tokens, start)
            kept = per_token[-1:]
            self._lengths[slot] = start + len(tokens)
            if step.kind is StepKind.DECODE:
                num_accepted = 0
                while per_token[num_accepted] in tokens[num_accepted + 1 : num_accepted + 2]:
                    num_accepted += 1
                kept = per_token[: num_accepted + 1]
                self._lengths[slot] = start + len(kept)
            self._sampled[slot] = kept[-1]
            sampled.append(kept)
            if self._num_drafts:
                self._draft(step, row)
        if not self._num_drafts:
            return StepResult(plan.step_index, np.array(sampled, np.int32)[:, 0])
        token_ids = np.full((len(sampled), self._num_drafts + 1), -1, np.int32)
        for row, kept in enumerate(sampled):
            token_ids[row, : len(kept)] = kept
        # As different from row to row and step to step as can be.
        sure = (token_ids[:, :1] * 7 + np.arange(self._num_drafts) * 3) % 11 / 11
        drafts = self._drafts[plan.slots].astype(np.int32)
        return StepResult(plan.step_index, token_ids, None, sure.astype(np.float32), drafts)

    def _draft(self, step: PackedStep, row: int) -> None:
        """What the row will sample next, and now and then something else."""
        slot = int(step.slots[row])
        length = int(self._lengths[slot])
        _, digest, _, tail = self._slots[slot][length % (ROLLBACK_MAX + 1)].tolist()
        token = int(self._sampled[slot])
        for place in range(self._num_drafts):
            digest, tail = _extend(digest, token), _extend(tail, token)
            token = _sample(digest, length + place + 1, self._sampling_of(step, row), tail)
            if digest % 5 == 0:
                token = (token + 1) % VOCAB_SIZE
            self._drafts[slot, place] = token

    def _sampling_of(self, step: PackedStep, row: int) -> tuple[float, int, float, int]:
        seed = int(step.seed_low[row]) + (int(step.seed_high[row]) << 32)
        return (
            float(step.temperatures[row]),
            int(step.top_ks[row]),
            float(step.top_ps[row]),
            seed,
        )

    def _chosen(self, plan: StepPlan, row: int, drafts: list[int], token: int) -> int:
        """What a row samples behind its last known token and `drafts`, where it may be `token`."""
        return token

    def _run_row(
        self, step: PackedStep, plan: StepPlan, row: int, tokens: list[int], start: int
    ) -> list[int]:
        slot, table = int(step.slots[row]), step.block_tables[row]
        assert slot > 0, "the padding slot was given to a sequence"
        ring = self._slots[slot]
        begun = ring[start % len(ring)].tolist() if start else (0, _EMPTY, 0, _EMPTY)
        visible, entry = self._replays.of_row(step, plan, row)
        if start < entry:
            self.num_replayed += len(tokens)
        if start == visible < entry:
            # Windows behind here are not seen, and the blocks are there.
            begun = [start, self._digest(table, start), _NO_TAIL, _NO_TAIL]
        num_seen, seen, tail_start, tail = begun
        assert num_seen == start, (
            f"slot {slot} has seen {num_seen} tokens, the row starts at {start}"
        )
        digest = self._digest(table, start)
        assert digest == seen, f"the blocks of row {row} do not hold what slot {slot} has seen"
        wanted = 0 if step.tail_starts is None else int(step.tail_starts[row])
        if step.tail_starts is None:
            wanted = tail_start
            assert tail_start == 0 or 0 < tail_start <= start - WINDOW + 1, (
                f"an exact step at {start} looks behind the start of a tail, {tail_start}"
            )
        elif start > wanted:
            assert tail_start == wanted, f"slot {slot} has a tail from {tail_start}, not {wanted}"
        sampled: list[int] = []
        for position, token in enumerate(tokens, start):
            if position < entry:
                assert self._pool[self._place(table, position)] == token, "a block of others"
            self._pool[self._place(table, position)] = token
            digest = _extend(digest, token)
            if position < wanted:
                tail_start, tail = _NO_TAIL, _NO_TAIL
            else:
                tail = _extend(_EMPTY if position == wanted else tail, token)
                tail_start = wanted
            ring[(position + 1) % len(ring)] = position + 1, digest, tail_start, tail
            number = position - start
            token = _sample(digest, position + 1, self._sampling_of(step, row), tail)
            if step.kind is StepKind.DECODE:
                token = self._chosen(plan, row, tokens[1 : number + 1], token)
            elif number == len(tokens) - 1:
                token = self._chosen(plan, row, [], token)
            sampled.append(token)
        return sampled

    def _digest(self, table: np.ndarray, stop: int) -> int:
        """Of the tokens before a position, as the blocks have them."""
        digest = _EMPTY
        for position in range(stop):
            digest = _extend(digest, int(self._pool[self._place(table, position)]))
        return digest

    def _place(self, table: np.ndarray, position: int) -> tuple[int, int]:
        block = int(table[position // self._block_size])
        assert block > 0, f"position {position} lies in the padding block"
        return block, position % self._block_size


class Replays:
    """Sequences that make the state behind their blocks anew, from `num_replayed` tokens before."""

    def __init__(self, num_replayed: int) -> None:
        self._num_replayed = num_replayed
        # Where they began, and where the blocks ended.
        self._begun: dict[int, tuple[int, int]] = {}

    def of_row(self, step: PackedStep, plan: StepPlan, row: int) -> tuple[int, int]:
        """Where a row began to make its state anew, and where its blocks ended; (0, 0) if it does
        not or is behind that.
        """
        sequence, start = int(plan.sequence_ids[row]), int(step.starts[row])
        if step.visible_starts is None or step.entry_starts is None or step.tail_starts is None:
            replay = 0, 0
        else:
            replay = int(step.visible_starts[row]), int(step.entry_starts[row])
        visible, entry = replay
        if not start or int(step.slots[row]) in plan.restores[:, 1]:
            self._begun.pop(sequence, None)
        if start == visible < entry:
            assert step.tail_starts is not None and entry - visible >= self._num_replayed > 0
            assert entry <= step.tail_starts[row], "the tail has no windows"
            self._begun[sequence] = replay
        elif start < entry:
            assert self._begun[sequence] == replay, "a replay begins in the middle"
        else:
            assert start >= self._begun.get(sequence, replay)[1], "windows that are not there"
        return replay if start < entry else (0, 0)
