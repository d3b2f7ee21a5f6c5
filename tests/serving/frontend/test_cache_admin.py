"""Goal: an operator's action reaches the tiers with the right keys and tenant, a prompt that nobody
has computed is computed, and everything else is refused by name.

Method: the answers of the tiers and of the engine are scripted.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.core.prefix import prefix_keys, root_key
from serving.frontend.auth import Principal
from serving.frontend.cache_admin import CacheAccess, CacheAdmin, CacheRefusal
from serving.frontend.errors import ApiError
from serving.kv.store import tenant_id
from tests.serving.frontend.test_protocols import MODEL as SMALL_MODEL

MODEL = replace(SMALL_MODEL, context_max=4096)
PROMPT = "abcdefgh" * 40
FINGERPRINT = b"f" * 32
SALT = "0" * 32


class Tiers:
    """Answers `blocks` to pins; what is not stored is there after a prompt was computed."""

    def __init__(self, num_stored: int = 0) -> None:
        self.num_stored = num_stored
        self.asked: list[tuple[str, bytes | None, bytes]] = []
        self.computed: list[Any] = []
        self.error = ""

    async def ask(
        self, what: str, tenant: bytes | None, keys: bytes, timeout_s: float
    ) -> Mapping[str, float | int]:
        self.asked.append((what, tenant, keys))
        if self.error:
            raise CacheRefusal(self.error)
        if what in ("pin", "warm"):
            if not self.num_stored:
                raise CacheRefusal("no prefix of it is stored")
            return {"blocks": min(self.num_stored, len(keys) // 16)}
        return {"asked": 1}

    def open(self, requests: list[Any]) -> Any:
        self.computed += requests
        self.num_stored = 1000

        async def admitted() -> None:
            return None

        async def updates() -> list[Any]:
            return [SimpleNamespace(finish_reason="length")]

        return SimpleNamespace(admitted=admitted, next=updates, close=lambda: None)


def admin_of(tiers: Tiers) -> CacheAdmin:
    access = CacheAccess(tiers.ask, FINGERPRINT, {"acme": SALT}.get)
    gateway: Any = tiers
    return CacheAdmin(access, gateway, MODEL)


def act(tiers: Tiers, **body: Any) -> dict[str, Any]:
    return asyncio.run(admin_of(tiers).act(json.dumps(body).encode()))


def keys_of_prompt(salt: str) -> bytes:
    ids = MODEL.codec.encode_text(PROMPT, adds_bos=True)
    keys = prefix_keys(root_key(FINGERPRINT, salt), np.array(ids[:-1], np.int32), 128)
    assert len(keys) == 2
    return b"".join(keys)


def test_a_stored_prompt_is_pinned_for_its_tenant() -> None:
    tiers = Tiers(num_stored=5)
    salt = Principal("acme", frozenset(), SALT).salted("own")
    answer = act(tiers, action="pin", prompt=PROMPT, tenant="acme", cache_salt="own")
    assert answer == {"tokens": 256, "blocks": 2} and not tiers.computed
    assert tiers.asked == [("pin", tenant_id(salt), keys_of_prompt(salt))]
    # All salts of a tenant with keys are one tenant to the tiers.
    assert tenant_id(salt) == tenant_id(Principal("acme", frozenset(), SALT).salted(""))
    act(tiers, action="unpin", prompt=PROMPT)
    assert tiers.asked[-1] == ("unpin", None, keys_of_prompt(""))


def test_a_prompt_that_is_not_stored_is_computed_first() -> None:
    for num_stored in (0, 1):
        tiers = Tiers(num_stored)
        assert act(tiers, action="warm", prompt=PROMPT)["blocks"] == 2
        (request,) = tiers.computed
        assert request.sampling.max_tokens == 1 and len(request.prompt_token_ids) > 256


def test_other_actions_are_handed_on() -> None:
    tiers = Tiers()
    assert act(tiers, action="flush") == act(tiers, action="purge") == {"asked": 1}
    act(tiers, action="purge", tenant="acme")
    assert tiers.asked[1:] == [
        ("purge", None, b""),
        ("purge", tenant_id(f"32:{SALT}"), b""),
    ]
    assert asyncio.run(admin_of(tiers).stats()) == {"asked": 1}
    assert asyncio.run(admin_of(tiers).metrics()) == {"asked": 1}


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"action": "dance"}, 400, "action is 'dance'; expected one of pin"),
        ({}, 400, "action is None"),
        ({"action": "pin"}, 400, "expected one of prompt and messages"),
        ({"action": "pin", "prompt": "short"}, 400, "expected at least 129"),
        ({"action": "pin", "prompt": PROMPT, "tenant": "none"}, 404, "no tenant 'none'"),
        ({"action": "purge", "tenant": 3}, 400, "tenant is 3"),
    ],
)
def test_what_makes_no_sense_is_refused(body: dict[str, Any], status: int, text: str) -> None:
    tiers = Tiers()
    with pytest.raises(ApiError, match=text) as caught:
        act(tiers, **body)
    assert caught.value.status == status and not tiers.asked


def test_tiers_that_do_not_answer_or_are_not_there() -> None:
    tiers = Tiers()
    tiers.error = "nobody answers"
    for body in ({"action": "flush"}, {"action": "warm", "prompt": PROMPT}):
        with pytest.raises(ApiError, match="nobody answers") as caught:
            act(tiers, **body)
        assert caught.value.status == 503
    gateway: Any = tiers
    with pytest.raises(ApiError, match="kv.storage is 'off'") as caught:
        asyncio.run(CacheAdmin(None, gateway, MODEL).stats())
    assert caught.value.status == 404
    assert asyncio.run(CacheAdmin(None, gateway, MODEL).metrics()) == {}
