"""Goal: what a cluster cannot take is refused at once and with the reason; its status is
that of its engines together.

Method: the reception of a router of a fleet, with and without workers.
"""

from serving.core.request import Request, SamplingParams
from serving.nodes.calls import Calls
from serving.nodes.messages import RefusalReason
from serving.nodes.reception import Reception
from tests.serving.engine.simulated_device import make_image
from tests.serving.nodes.fleet import OPTIONS, Fleet


def reception_of(fleet: Fleet) -> Reception:
    router = fleet.router
    return Reception(router.registry, router.pools, router.vision, Calls(), OPTIONS)


def request_of(length: int, *images: int) -> Request:
    spans = tuple(make_image(1 + 4 * n, 3, name) for n, name in enumerate(images))
    return Request("a", (3,) * length, SamplingParams(max_tokens=5), images=spans)


def test_requests_are_refused_for_what_is_wrong_with_them_or_with_the_cluster() -> None:
    empty = reception_of(Fleet(0, 0)).refusal(request_of(10))
    assert empty is not None and empty.reason is RefusalReason.UNAVAILABLE
    # A vision worker alone serves nobody.
    alone = reception_of(Fleet(0, 0, num_vision=1)).refusal(request_of(10))
    assert alone is not None and alone.reason is RefusalReason.UNAVAILABLE
    reception = reception_of(Fleet(num_vision=1))
    assert reception.refusal(request_of(10)) is reception.refusal(request_of(20, 1, 2)) is None
    long = reception.refusal(request_of(64))
    assert long is not None and (long.reason, long.param) == (RefusalReason.INVALID, "prompt")


def test_the_status_is_that_of_all_engines() -> None:
    fleet = Fleet(num_vision=1)
    fleet.run(1)
    status = reception_of(fleet).worker_status(7)
    # Four workers with four slots each; one without an engine.
    assert (status.query_id, status.failure, status.engine.num_slots) == (7, None, 16)
    assert status.vision["0"].num_encoded == 0
    assert reception_of(Fleet(2, 0, num_vision=1)).worker_status(8).failure == (
        "no decode worker is there"
    )
