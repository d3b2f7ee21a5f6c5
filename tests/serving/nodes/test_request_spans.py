"""Goal: whoever traces a call learns what each node did for it and when, whatever becomes of it,
and nothing is noted of others.

Method: requests of a fleet in virtual time, whose workers fail; the notes in the outboxes.
"""

from serving.nodes import messages
from serving.observe import SpanNote
from tests.serving.nodes.fleet import FRONTEND, ROUTER, STEP_NS, Fleet

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def told(notes: list[SpanNote]) -> list[tuple[str, str, str]]:
    """Node without its name, phase and fault of each, in the order in which they began."""
    notes = sorted(notes, key=lambda note: (note.start_ns, note.end_ns))
    return [
        (str(note.attributes["deepinfer.node"]).split("/")[0], note.name, note.fault)
        for note in notes
    ]


def test_every_phase_is_noted_once_by_the_node_that_has_it() -> None:
    fleet = Fleet()
    fleet.submit("a", length=40, traceparent=PARENT)
    fleet.submit("nobody traces this one", length=40)
    fleet.run()
    assert len(fleet.ended) == 2
    assert {note.parent for note in fleet.notes} == {PARENT}
    assert sorted(told(fleet.notes)) == [
        ("decode", "decode", ""),
        ("decode", "hand-off", ""),
        ("prefill", "hand-off", ""),
        ("prefill", "prefill", ""),
        ("prefill", "queue", ""),
        ("router", "attempt", ""),
        ("router", "queue", ""),
    ]
    by_name = {(str(n.attributes["deepinfer.node"])[:6], n.name): n for n in fleet.notes}
    prefill, decode = by_name["prefil", "prefill"], by_name["decode", "decode"]
    assert prefill.end_ns == by_name["prefil", "hand-off"].start_ns
    assert prefill.end_ns - prefill.start_ns >= STEP_NS
    assert by_name["decode", "hand-off"].end_ns == decode.start_ns
    counts = [note.attributes.get("deepinfer.num_tokens") for note in (prefill, decode)]
    assert counts == [None, 11], "the first token is the hand-off's"
    attempt = by_name["router", "attempt"].attributes
    assert attempt["deepinfer.decode"] == decode.attributes["deepinfer.node"]
    assert attempt["deepinfer.number"] == 0
    assert by_name["router", "attempt"].start_ns == by_name["router", "queue"].end_ns


def test_a_lost_worker_shows_as_a_fault_of_the_attempt_and_another_one_follows() -> None:
    fleet = Fleet()
    fleet.submit("a", length=40, traceparent=PARENT, max_tokens=60)
    fleet.run(until=lambda: len(fleet.tokens.get("a", ())) > 20)
    (lost,) = [node for node in fleet.decode if not fleet.worker(node).is_idle]
    fleet.kill(lost)
    fleet.run(3)
    assert "a" in fleet.ended
    attempts = [note for note in fleet.notes if note.name == "attempt"]
    assert [bool(note.fault) for note in attempts] == [True, False]
    assert str(lost) in attempts[0].fault
    assert [note.attributes["deepinfer.number"] for note in attempts] == [0, 1]
    assert len([n for n in fleet.notes if n.name == "queue" and "router" in told([n])[0]]) == 2


def test_aborts_end_what_they_find() -> None:
    fleet = Fleet()
    fleet.submit("a", length=40, traceparent=PARENT, max_tokens=60)
    fleet.run(until=lambda: len(fleet.tokens.get("a", ())) > 20)
    fleet.give(FRONTEND, ROUTER, messages.Abort("a"))
    fleet.run()
    assert ("router", "attempt", "aborted") in told(fleet.notes)
    assert ("decode", "decode", "aborted") in told(fleet.notes)
    fleet.check_at_rest()
