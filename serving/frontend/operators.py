"""What only the operator of a server may ask for, and how it is known that it is the operator.

A trace shows when which requests ran and writes to the server's disk, so it is not for everyone
who may generate text.
"""

import contextlib
import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Address

from serving.core.profiling import (
    SECONDS_MAX,
    STEPS_MAX,
    ProfileProblem,
    ProfileRefusal,
)
from serving.frontend import fields
from serving.frontend.errors import ApiError, bad_request, decode_body, unavailable
from serving.frontend.gateway import Gateway
from serving.nodes.messages import WorkerStatus

_TIMEOUT_S = 60.0

_STATUS = {
    ProfileProblem.OFF: 404,
    ProfileProblem.BUSY: 409,
    ProfileProblem.UNWRITABLE: 500,
    ProfileProblem.FAILED: 500,
}


def check_operator(client: Address | None, headers: Mapping[str, str]) -> None:
    """The one place that decides who may operate the server: whoever is on its machine.

    A browser there also makes calls for the pages of others. It names their `Origin`, or asks for
    this server by a name of theirs that leads here.

    Raises:
        ApiError: 403, the call comes from elsewhere.
    """
    asked, origin = headers.get("host", ""), headers.get("origin")
    is_page_of_others = origin is not None and origin.partition("://")[2] != asked
    if is_page_of_others or not _is_plain(asked):
        raise ApiError(
            403,
            f"Only callers on the server's machine may do that; this call was for {asked!r}"
            + ("" if origin is None else f" from a page of {origin!r}"),
            code="not_the_operator",
        )
    host = "" if client is None else client.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    mapped = getattr(address, "ipv4_mapped", None)
    if address is None or not (mapped or address).is_loopback:
        raise ApiError(
            403,
            f"Only callers on the server's machine may do that; this call came from {host!r}",
            code="not_the_operator",
        )


def _is_plain(netloc: str) -> bool:
    """Whether a host is an address, or the name that every machine has for itself."""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{netloc}").hostname or "localhost"
        return name == "localhost" or ipaddress.ip_address(name) is not None
    return False


def status_of(status: WorkerStatus, gateway: Gateway, num_queued: int) -> dict[str, Any]:
    """What the nodes of this process and the KV tiers hold; `num_queued` calls wait in front."""
    engine = status.engine
    worker = {
        "name": str(gateway.worker),
        "state": "serving" if status.failure is None else "failed",
        "running": engine.num_running,
        "waiting": engine.num_waiting,
    }
    front = {
        "name": str(gateway.node_id),
        "state": "draining" if gateway.is_draining else "serving",
        "running": gateway.num_open,
        "waiting": num_queued,
    }
    return {
        "failure": status.failure,
        "nodes": [front, worker],
        "engine": engine,
        "tiers": status.offload,
        "programs": status.programs,
    }


async def capture_profile(raw: bytes, gateway: Gateway) -> dict[str, Any]:
    """The answer to a body `{"num_steps": 10, "timeout_s": 60}`, of which both may be left out.

    Raises:
        ApiError: 400 for the field at fault; 404, traces are off; 409, one is being made; 500, it
            cannot be written; 503, the worker does not answer.
    """
    body = decode_body(raw) if raw.strip() else {}
    for name in body:
        if name not in ("num_steps", "timeout_s"):
            raise bad_request(f"{name} is unknown; expected num_steps or timeout_s", name)
    num_steps = fields.integer(body, "num_steps")
    num_steps = 10 if num_steps is None else num_steps
    if not 1 <= num_steps <= STEPS_MAX:
        raise bad_request(f"num_steps is {num_steps}; expected 1 to {STEPS_MAX}", "num_steps")
    timeout_s = fields.number(body, "timeout_s")
    timeout_s = _TIMEOUT_S if timeout_s is None else timeout_s
    if not 0 < timeout_s <= SECONDS_MAX:
        raise bad_request(
            f"timeout_s is {timeout_s:g}; expected more than 0, to {SECONDS_MAX:g}", "timeout_s"
        )
    result = await gateway.profile(num_steps, timeout_s)
    if result is None:
        raise unavailable("The worker does not answer")
    if isinstance(result, ProfileRefusal):
        raise ApiError(_STATUS[result.problem], result.detail, code=result.problem.value)
    return {"directory": result.directory, "steps": list(result.step_indexes)}
