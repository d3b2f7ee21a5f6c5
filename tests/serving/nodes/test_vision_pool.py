"""Goal: images are encoded by vision workers, each once and its features moved once, while requests
without images pass by; whatever happens to the workers, a request gets the tokens of one without
them; and nobody keeps anything of it but the cache of a vision worker.

Method: a whole fleet in virtual time, whose devices compare features with those of the picture.
"""

from dataclasses import replace

import pytest

from serving.core.request import FinishReason, RequestImage
from serving.nodes import messages
from serving.nodes.messages import RefusalReason
from serving.nodes.values import NodeId
from tests.serving.engine.simulated_device import expected_tokens, make_image
from tests.serving.nodes.fleet import FRONTEND, MS, OPTIONS, ROUTER, Fleet

TWO = (make_image(2, 5, 1), make_image(9, 4, 2))


def finish(fleet: Fleet, *names: str, seconds: float = 20) -> None:
    fleet.run(seconds, until=lambda: set(names) <= set(fleet.ended))
    fleet.run(1)
    fleet.check_at_rest()


def counted(fleet: Fleet) -> tuple[int, int]:
    """Images that prompts had to encode, and those of which they had features."""
    devices = [fleet.device(node_id) for node_id in (*fleet.prefill, *fleet.decode)]
    return sum(d.num_encoded for d in devices), sum(d.num_given for d in devices)


def sent(fleet: Fleet, kind: type) -> int:
    return sum(isinstance(message, kind) for _, _, message in fleet.sent)


def images_of(*names: int) -> tuple[RequestImage, ...]:
    return tuple(make_image(1 + 4 * n, 3, name) for n, name in enumerate(names))


@pytest.mark.parametrize("local_ms", [0.0, 100.0])
def test_images_are_encoded_once_and_moved_once(local_ms: float) -> None:
    fleet = Fleet(options=replace(OPTIONS, local_prefill_ms=local_ms), num_vision=2)
    request = fleet.submit("a", 20, images=TWO)
    finish(fleet, "a")
    assert fleet.tokens["a"] == expected_tokens(request, 3, 64)
    assert counted(fleet) == (0, 2) and fleet.admitted == ["a"]
    statuses = [fleet.vision_status(node_id) for node_id in fleet.vision]
    # One for each: tokens in flight decide.
    assert [status.num_encoded for status in statuses] == [1, 1]
    assert [status.num_sent for status in statuses] == [1, 1]
    kinds = [type(message).__name__ for _, _, message in fleet.sent]
    # No room is kept for a request whose images are not encoded yet.
    assert kinds.index("Encoded") < kinds.index("Reserve")
    assert sent(fleet, messages.Features) == 2


def test_a_picture_that_comes_again_goes_to_who_had_it() -> None:
    fleet = Fleet(num_vision=2)
    fleet.submit("first", 20, images=TWO)
    finish(fleet, "first")
    # Without a memory all of these would go to the first worker, who has had the other picture.
    for number in range(3):
        request = fleet.submit(f"r{number}", 20, salt=number + 1, images=TWO[1:])
        finish(fleet, f"r{number}")
        assert fleet.tokens[f"r{number}"] == expected_tokens(request, 3, 64)
    statuses = [fleet.vision_status(node_id) for node_id in fleet.vision]
    assert [status.num_encoded for status in statuses] == [1, 1]
    assert [status.num_hits for status in statuses] == [0, 3]


def test_features_of_a_cached_prompt_are_dropped_with_it() -> None:
    fleet = Fleet(1, 1, num_vision=1)
    for name in ("a", "b"):
        request = fleet.submit(name, 30, images=TWO)
        finish(fleet, name)
        assert fleet.tokens[name] == expected_tokens(request, 3, 64)
    # The second one found its images computed: what came of them was not used.
    assert counted(fleet) == (0, 2)
    taken = [fleet.worker(node_id).status().features.num_taken for node_id in fleet.prefill]
    assert taken == [4]


def test_a_vision_worker_of_another_model_is_refused() -> None:
    fleet = Fleet()
    fleet.add_vision("odd", features=b"o" * 32)
    assert not fleet.router.vision.is_usable
    assert "vision/odd has features of images of 6f6f6f6f6f6f6f6f and" in fleet.quits[0]


def test_a_picture_twice_in_one_prompt() -> None:
    fleet = Fleet(num_vision=1)
    request = fleet.submit("a", 20, images=(make_image(2, 5, 1), make_image(9, 5, 1)))
    finish(fleet, "a")
    assert fleet.tokens["a"] == expected_tokens(request, 3, 64)
    assert counted(fleet) == (0, 2) and sent(fleet, messages.Features) == 1


def test_text_passes_images_that_wait() -> None:
    fleet = Fleet(num_vision=1)
    fleet.encode_ns = 2000 * MS
    fleet.submit("image", 20, images=TWO)
    fleet.submit("text", 20, salt=3)
    fleet.run(1, until=lambda: "text" in fleet.ended)
    assert fleet.router.phases() == {"encoding": 1} and "image" not in fleet.tokens
    finish(fleet, "image")


@pytest.mark.parametrize("how", ["kill", "restart", "stop"])
def test_a_lost_vision_worker_has_its_images_encoded_elsewhere(how: str) -> None:
    fleet = Fleet(num_vision=2)
    fleet.encode_ns = 300 * MS
    request = fleet.submit("a", 20, images=TWO)
    fleet.run(0.1)
    lost = fleet.vision[0]
    assert fleet.vision_status(lost).num_encoding == 1
    fleet.stop(lost) if how == "stop" else fleet.kill(lost)
    if how == "restart":
        fleet.add_vision(lost.name)
    fleet.run(20, until=lambda: "a" in fleet.ended)
    if how == "stop":
        fleet.go_on(lost)
        fleet.run(2)
        assert fleet.vision_worker(lost).is_member
    fleet.run(1)
    assert fleet.tokens["a"] == expected_tokens(request, 3, 64)
    assert fleet.router.vision.num_again >= 1 and counted(fleet) == (0, 2)
    fleet.check_at_rest()


def test_one_that_is_lost_with_features_in_it_costs_time_and_no_token() -> None:
    fleet = Fleet(num_vision=1)
    fleet.lose = lambda _source, _destination, message: isinstance(message, messages.ReadFeatures)
    request = fleet.submit("a", 20, images=TWO)
    finish(fleet, "a")
    assert fleet.tokens["a"] == expected_tokens(request, 3, 64)
    assert counted(fleet) == (2, 0)
    lost = [fleet.worker(node_id).status().features.num_lost for node_id in fleet.prefill]
    assert sum(lost) == 2


def test_features_that_had_to_go_are_encoded_with_the_prompt() -> None:
    fleet = Fleet(num_vision=1, vision_bytes=20)
    request = fleet.submit("a", 20, images=TWO)
    finish(fleet, "a")
    assert fleet.tokens["a"] == expected_tokens(request, 3, 64)
    # There is room for the features of five tokens.
    assert counted(fleet) == (1, 1)
    assert fleet.vision_status(fleet.vision[0]).kept_bytes <= 20


def test_without_vision_workers_prompts_encode_their_images() -> None:
    fleet = Fleet()
    request = fleet.submit("a", 20, images=TWO)
    finish(fleet, "a")
    assert fleet.tokens["a"] == expected_tokens(request, 3, 64) and counted(fleet) == (2, 0)
    assert fleet.router.pools.missing_roles == []
    # One that comes later is used, and one that goes is not waited for.
    node_id = fleet.add_vision("late")
    fleet.submit("b", 20, salt=1, images=TWO)
    finish(fleet, "b")
    assert counted(fleet) == (2, 2)
    fleet.encode_ns = 10_000 * MS
    fleet.submit("c", 20, salt=2, images=images_of(7, 8))
    fleet.run(0.1)
    fleet.kill(node_id)
    finish(fleet, "c", seconds=3)
    assert counted(fleet) == (4, 2) and fleet.ended["c"] is FinishReason.LENGTH


def test_lost_prefill_workers_do_not_cost_another_encoding() -> None:
    fleet = Fleet(num_vision=1)
    request = fleet.submit("a", 40, images=TWO)
    fleet.run(5, until=lambda: fleet.router.phases().get("prefilling", 0) == 1)
    (at,) = {d for _, d, m in fleet.sent if isinstance(m, messages.Prefill)}
    fleet.kill(at)
    finish(fleet, "a")
    assert fleet.tokens["a"] == expected_tokens(request, 3, 64)
    status = fleet.vision_status(fleet.vision[0])
    assert status.num_encoded == 2 and status.num_sent == 4


@pytest.mark.parametrize("when", ["encoding", "prefilling", "decoding"])
def test_an_aborted_request_leaves_nothing(when: str) -> None:
    fleet = Fleet(num_vision=1)
    fleet.encode_ns = 50 * MS
    fleet.submit("a", 40, images=TWO, max_tokens=20)
    fleet.run(5, until=lambda: fleet.router.phases().get(when, 0) == 1)
    fleet.give(FRONTEND, ROUTER, messages.Abort("a"))
    fleet.run(3)
    assert not fleet.ended
    fleet.check_at_rest()
    assert fleet.router.vision.load(fleet.router.registry.members("vision")[0]) == {
        "image_tokens": 0
    }


def test_a_full_line_of_images_refuses_more_and_no_text() -> None:
    fleet = Fleet(options=replace(OPTIONS, images_waiting_max=4), num_vision=1)
    fleet.encode_ns = 100 * MS
    names = [fleet.submit(f"r{n}", 20, n, images_of(2 * n, 2 * n + 1)).request_id for n in range(3)]
    assert fleet.ended["r2"].reason is RefusalReason.BUSY
    assert "4 images wait to be encoded already" in fleet.ended["r2"].detail
    fleet.submit("text", 20)
    finish(fleet, "text", *names)
    assert {fleet.ended[name] for name in ("r0", "r1", "text")} == {FinishReason.LENGTH}


def test_images_that_a_worker_has_no_room_for_are_given_again() -> None:
    # A worker has room for 8 besides the two that it encodes.
    fleet = Fleet(num_vision=1)
    fleet.encode_ns = 60 * MS
    requests = [fleet.submit(f"r{n}", 20, n, images_of(3 * n, 3 * n + 1)) for n in range(7)]
    refusals = [m for s, _, m in fleet.sent if isinstance(m, messages.Refused)]
    assert len(refusals) == 4
    finish(fleet, *[request.request_id for request in requests])
    for request in requests:
        assert fleet.tokens[request.request_id] == expected_tokens(request, 3, 64)
    assert counted(fleet) == (0, 14)


def test_a_picture_that_no_worker_can_encode_is_left_to_the_prompt() -> None:
    fleet = Fleet(num_vision=1)
    fleet.lose = lambda _source, _destination, message: isinstance(message, messages.Encode)
    request = fleet.submit("a", 20, images=TWO)
    for _ in range(4):
        fleet.run(0.3)
        vision = NodeId("vision", "0")
        fleet.kill(vision)
        fleet.add_vision("0")
    finish(fleet, "a", seconds=2)
    assert fleet.tokens["a"] == expected_tokens(request, 3, 64) and counted(fleet) == (2, 0)


def test_an_image_of_which_nothing_is_heard_is_asked_for_again() -> None:
    fleet = Fleet(num_vision=1)
    lost: list[object] = []

    def lose(_source: NodeId, _destination: NodeId, message: object) -> bool:
        is_hit = isinstance(message, messages.Encoded) and not lost
        lost.extend([message] * is_hit)
        return is_hit

    fleet.lose = lose
    fleet.submit("a", 20, images=TWO)
    finish(fleet, "a", seconds=3)
    assert lost and counted(fleet) == (0, 2)


def test_a_leaving_worker_is_given_nothing_and_answers_for_a_while() -> None:
    fleet = Fleet(num_vision=2)
    fleet.run(1)
    leaving = fleet.vision_worker(fleet.vision[0])
    leaving.drain()
    assert not leaving.is_idle
    fleet.run(0.15)
    fleet.submit("a", 20, images=TWO)
    finish(fleet, "a")
    assert fleet.vision_status(fleet.vision[0]).num_encoded == 0 and leaving.is_idle


def test_the_overview_tells_of_vision_workers() -> None:
    fleet = Fleet(num_vision=1)
    fleet.encode_ns = 500 * MS
    fleet.run(1)
    fleet.submit("a", 20, images=TWO)
    fleet.run(0.2)
    overview = fleet.router.overview()
    assert overview["num_waiting_images"] == 2 and overview["requests"] == {"encoding": 1}
    nodes = overview["nodes"]
    assert isinstance(nodes, list)
    (node,) = [node for node in nodes if node["node"] == "vision/0"]
    assert node["load"] == {"image_tokens": 9} and node["status"].vision.num_encoding == 2
