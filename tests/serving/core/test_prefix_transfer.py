"""Goal: a prefix that one engine computed serves another one, no token changes by it, and nothing
is left held.

Method: two engines with simulated devices, which read every context back from blocks and slots;
prefixes are carried between them by hand, also at moments when there is no room for them.
"""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from serving.core.kv_transfer import KVRead, KVTransfer
from serving.core.prefix import PrefixKey
from serving.core.prefix_transfer import StagedPrefix
from serving.core.replay import ReplayMode, ReplayRule
from serving.core.request import Request, SamplingParams
from tests.serving.engine.checked_engine import BUCKETS, CheckedEngine, make_limits
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import ROLLBACK_MAX, WINDOW, make_image

ONE = SamplingParams(max_tokens=1, temperature=0, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=20, temperature=0, seed=3, ignore_eos=True)


def make_checked(**changes: Any) -> CheckedEngine:
    checked = CheckedEngine(make_limits(**{"num_snapshots": 8, **changes}), BUCKETS)
    checked.engine.transfers.record()
    return checked


class Shelf:
    """What was read from engines, by key."""

    def __init__(self) -> None:
        self.blocks: dict[PrefixKey, list[np.ndarray]] = {}
        self.states: dict[PrefixKey, np.ndarray] = {}

    def take(self, checked: CheckedEngine, keys: tuple[PrefixKey, ...]) -> KVRead:
        transfer, blocks, has_state = checked.engine.transfers.read(keys, keys[-1])
        checked.device.move(transfer)
        read = checked.device.collect_read()
        assert read.transfer_id == transfer.transfer_id and len(read.states) == has_state
        for index, key in enumerate(blocks):
            self.blocks[key] = [group[index] for group in read.groups]
        if has_state:
            self.states[keys[-1]] = read.states[0]
        return read

    def staged(self, keys: tuple[PrefixKey, ...], first: int = 0) -> StagedPrefix:
        columns = zip(*(self.blocks[key] for key in keys[first:]), strict=True)
        return StagedPrefix(keys, first, tuple(map(np.stack, columns)), self.states[keys[-1]])


REPLAY = ReplayRule(ReplayMode.COMPACT, WINDOW + ROLLBACK_MAX, num_replayed=6)


def keys_of(checked: CheckedEngine, prompt: list[int]) -> tuple[PrefixKey, ...]:
    return checked.engine.transfers.keys_of(Request("any", tuple(prompt), ONE))


def computed(prompt: list[int], sampling: SamplingParams = ONE) -> tuple[CheckedEngine, Shelf]:
    source, shelf = make_checked(), Shelf()
    source.admit(prompt, sampling)
    source.drain()
    for _, keys in source.engine.transfers.take_kept():
        shelf.take(source, keys)
    return source, shelf


@pytest.mark.parametrize("num_present", [0, 1, 5])
def test_a_prefix_serves_another_engine(num_present: int) -> None:
    prompt = prompt_of(30)
    _, shelf = computed(prompt)
    target = make_checked()
    target.admit(prompt[: 4 * num_present + 2], ONE)
    target.drain()
    keys = keys_of(target, prompt)
    assert len(keys) == 7 and target.engine.transfers.num_present(keys) == num_present
    transfer = target.engine.transfers.write(shelf.staged(keys, first=min(num_present, 3)))
    assert transfer is not None and len(transfer.write_blocks) == 7 - num_present
    target.device.move(transfer)
    target.check()
    name = target.admit(prompt, LONG)
    target.drain()
    assert target.num_cached[name] == 28


def test_prompts_are_kept_at_once_and_answers_at_their_end() -> None:
    source = make_checked()
    source.admit(prompt_of(9), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    source.step()
    transfers = source.engine.transfers
    ((_, keys),) = transfers.take_kept()
    assert keys == keys_of(source, prompt_of(9)) and transfers.take_kept() == []
    source.drain()
    # 20 tokens were fed: the last one never is.
    ((_, tail),) = transfers.take_kept()
    assert len(tail) == 5 and tail[:2] == keys


def test_what_follows_a_prompt_serves_a_conversation_elsewhere() -> None:
    prompt = prompt_of(9)
    source, shelf = computed(prompt, LONG)
    longer = prompt + source.outputs["request-0"] + prompt_of(6, salt=2)
    target = make_checked()
    keys = keys_of(target, longer)[:7]
    transfer = target.engine.transfers.write(shelf.staged(keys))
    assert transfer is not None
    target.device.move(transfer)
    name = target.admit(longer, ONE)
    target.drain()
    assert target.num_cached[name] == 28


def test_what_is_not_needed_or_does_not_fit_is_left() -> None:
    prompt = prompt_of(30)
    source, shelf = computed(prompt)
    keys = keys_of(source, prompt)
    assert source.engine.transfers.write(shelf.staged(keys)) is None
    # A block that was left out is not there.
    assert make_checked().engine.transfers.write(shelf.staged(keys, first=1)) is None
    # Six of nine blocks are held by a running sequence, and seven are wanted.
    small = make_checked(num_blocks=10, context_max=40)
    small.admit(prompt_of(23, salt=1), LONG)
    small.step()
    assert small.engine.transfers.write(shelf.staged(keys)) is None
    small.check()
    small.drain()
    assert small.engine.transfers.write(shelf.staged(keys)) is not None
    # All snapshots wait for a step in flight.
    busy = make_checked(num_snapshots=1, in_flight_max=2)
    busy.admit(prompt_of(9, salt=1), LONG)
    busy.plan()
    assert busy.engine.transfers.write(shelf.staged(keys)) is None
    busy.drain()


def test_blocks_that_are_held_while_room_is_made_stay() -> None:
    """The beginning is the least recently used of what is free, and yet must not be evicted."""
    prompt = prompt_of(30)
    _, shelf = computed(prompt)
    target = make_checked(num_blocks=10, context_max=40)
    target.admit(prompt[:10], ONE)
    target.drain()
    target.admit(prompt_of(22, salt=1), ONE)
    target.drain()
    keys = keys_of(target, prompt)
    assert target.engine.transfers.num_present(keys) == 2
    transfer = target.engine.transfers.write(shelf.staged(keys, first=2))
    assert transfer is not None and len(transfer.write_blocks) == 5
    target.device.move(transfer)
    target.check()
    name = target.admit(prompt, ONE)
    target.drain()
    assert target.num_cached[name] == 28


def test_a_waiting_restore_keeps_its_snapshot() -> None:
    prompt = prompt_of(9)
    _, shelf = computed(prompt)
    target = make_checked(num_snapshots=2)
    for salt in (1, 2):
        target.admit(prompt_of(9, salt=salt), ONE)
        target.drain()
    table, transfers = target.engine._table, target.engine.transfers
    slots = [table.prefixes.snapshot(keys_of(target, prompt_of(9, salt))[-1]) for salt in (1, 2)]
    first, second = slots
    assert first is not None and second is not None
    staged = shelf.staged(keys_of(target, prompt))
    # The one that would have to go is about to be used, then both are.
    table._restores = {1: first, 2: second}
    assert transfers.write(staged) is None
    table._restores = {1: first}
    transfer = transfers.write(staged)
    assert transfer is not None and transfer.write_slots.tolist() == [second]


def test_what_is_staged_is_written_when_its_request_starts() -> None:
    """More requests than snapshots wait for their prefixes, and all of them go on from them."""
    prompts = [prompt_of(14, salt=salt) for salt in range(12)]
    target = make_checked(num_snapshots=2, num_blocks=33)
    transfers, num_written = target.engine.transfers, 0

    def deliver(transfer: KVTransfer | None) -> None:
        nonlocal num_written
        assert transfer is not None
        num_written += 1
        target.device.move(transfer)

    transfers.deliver = deliver
    names: list[str] = []
    for number, prompt in enumerate(prompts):
        _, shelf = computed(prompt)
        transfers.stage(f"request-{number}", shelf.staged(keys_of(target, prompt)))
        names.append(target.admit(prompt, LONG))
    assert not num_written and transfers.num_staged_bytes > 0
    target.abort(names.pop())
    target.drain()
    assert [target.num_cached[name] for name in names] == [12] * 11
    assert num_written == 11 and transfers.num_staged_bytes == 0


def test_a_request_does_not_wait_for_ever_for_what_is_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = prompt_of(14)
    _, shelf = computed(prompt)
    target = make_checked(num_snapshots=1)
    delivered: list[KVTransfer | None] = []
    target.engine.transfers.deliver = delivered.append
    target.admit(prompt_of(9, salt=1), ONE)
    target.drain()
    # Nobody may have the only slot.
    monkeypatch.setattr(target.engine._table, "is_restored_from", lambda slot: True)
    target.engine.transfers.stage("request-2", shelf.staged(keys_of(target, prompt)))
    target.admit(prompt_of(3), SamplingParams(max_tokens=36, temperature=0, ignore_eos=True))
    name = target.admit(prompt, ONE)
    target.drain()
    assert delivered == [None] and target.num_cached[name] == 0


def test_pins_are_bounded_and_end() -> None:
    target = make_checked(num_blocks=17, num_snapshots=4, context_max=40)
    transfers, prefixes = target.engine.transfers, target.engine._table.prefixes
    pinned = [prompt_of(14, salt=salt) for salt in (1, 2, 3)]
    for number, prompt in enumerate(pinned):
        target.admit(prompt, ONE)
        target.drain()
        transfers.pin(number, keys_of(target, prompt))
    # The third would have been more than half of the snapshots.
    for salt in range(4, 10):
        target.admit(prompt_of(14, salt=salt), ONE)
        target.drain()
    left = [transfers.num_present(keys_of(target, prompt)) for prompt in pinned]
    assert left == [3, 3, 0] and prefixes.num_pinned == 6
    assert [prefixes.num_usable(keys_of(target, prompt)) for prompt in pinned] == [3, 3, 0]
    # Whoever runs may have all of it.
    target.admit(prompt_of(38, salt=20), ONE)
    target.admit(prompt_of(24, salt=21), ONE)
    target.drain()
    for number in range(3):
        transfers.unpin(number)
    assert prefixes.num_pinned == 0


def test_reading_leaves_out_what_is_gone() -> None:
    source = make_checked(num_blocks=10, context_max=40)
    source.admit(prompt_of(30), ONE)
    source.drain()
    keys = keys_of(source, prompt_of(30))
    source.admit(prompt_of(18, salt=1), ONE)
    source.drain()
    shelf = Shelf()
    read = shelf.take(source, keys)
    num_left = source.engine.transfers.num_present(keys)
    assert 0 < num_left < 7 and list(shelf.blocks) == list(keys[:num_left])
    assert all(len(group) == num_left for group in read.groups) and not shelf.states


def test_keys_are_those_of_the_engine_and_none_where_nothing_can_serve() -> None:
    source = make_checked()
    image = make_image(5, 6)
    request = Request("a", tuple(prompt_of(21)), ONE, images=(image,), cache_salt="t")
    keys = source.engine.transfers.keys_of(request)
    source.engine.admit(request)
    (sequence,) = source.engine._waiting
    assert list(keys) == source.engine._table.whole_keys(sequence) and len(keys) == 5
    plain = source.engine.transfers.keys_of(Request("a", tuple(prompt_of(21)), ONE))
    assert not set(keys) & set(plain)
    logprobs = SamplingParams(prompt_logprobs=1)
    assert source.engine.transfers.keys_of(Request("a", (1,) * 9, logprobs)) == ()
    nothing = CheckedEngine(make_limits(), BUCKETS)
    assert nothing.engine.transfers.keys_of(Request("a", (1,) * 9, ONE)) == ()


def test_with_replay_blocks_alone_serve_another_engine() -> None:
    prompt = prompt_of(40)
    source = make_checked(replay=REPLAY)
    request = Request("any", tuple(prompt), ONE)
    source.admit(prompt, ONE)
    source.drain()
    shelf = Shelf()
    for _, keys in source.engine.transfers.take_kept():
        shelf.take(source, keys)
    target = make_checked(replay=REPLAY)
    transfers = target.engine.transfers
    wanted = transfers.wanted(request)
    # The tail starts at 31: seven blocks are of use, the first of them alone is not.
    assert wanted is not None and not (wanted.has_state or transfers.needs_states)
    assert (len(wanted.keys), wanted.first, wanted.num_usable) == (7, 0, 1)
    staged = dataclasses.replace(shelf.staged(wanted.keys), state=None)
    transfer = transfers.write(staged)
    assert transfer is not None and len(transfer.write_blocks) == 7
    assert not len(transfer.write_slots) and transfers.write(staged) is None
    target.device.move(transfer)
    assert transfers.wanted(request) is None
    # Longer prompts want what lies behind.
    longer = Request("longer", (*prompt, *prompt_of(12, salt=2)), ONE)
    more = transfers.wanted(longer)
    assert more is not None and (len(more.keys), more.first, more.num_usable) == (10, 7, 7)
    name = target.admit(prompt, LONG)
    target.drain()
    assert target.num_cached[name] == 28 - 6
    # All of it is there, and so is a state now.
    assert transfers.wanted(request) is None


@pytest.mark.parametrize("seed", range(6))
def test_engines_that_share_a_shelf_never_say_a_wrong_token(seed: int) -> None:
    """Conversations that jump between two small engines, with transfers at any moment."""
    source = random.Random(seed)
    engines = [
        make_checked(num_blocks=24, context_max=60, num_snapshots=3, in_flight_max=1 + seed % 2)
        for _ in range(2)
    ]
    shelf, num_written = Shelf(), 0
    prompts = [prompt_of(8, salt=i) for i in range(3)]
    for _ in range(120):
        checked = source.choice(engines)
        transfers = checked.engine.transfers
        kind = source.randrange(6)
        if kind == 0:
            prompt = source.choice(prompts) + prompt_of(source.randrange(20), source.randrange(2))
            keys = keys_of(checked, prompt)
            while keys and not (keys[-1] in shelf.states and set(keys) <= set(shelf.blocks)):
                keys = keys[:-1]
            first = source.randint(0, transfers.num_present(keys))
            if keys and first < len(keys):
                transfer = transfers.write(shelf.staged(keys, first))
                if transfer is not None:
                    checked.device.move(transfer)
                    num_written += 1
                    checked.check()
            sampling = SamplingParams(max_tokens=source.randint(1, 12), temperature=0)
            checked.admit(prompt, sampling)
        elif kind == 1:
            checked.plan()
        elif kind < 4:
            checked.step()
        else:
            while checked.device.in_flight:
                checked.commit()
            for _, keys in transfers.take_kept():
                shelf.take(checked, keys)
    for checked in engines:
        checked.drain()
    assert num_written > 3
