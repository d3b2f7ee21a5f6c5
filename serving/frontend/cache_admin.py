"""What the operator may see of the KV tiers, and ask of them: `/admin/cache`.

GET gives numbers. POST takes an `action`: `pin` and `warm` bring what is stored of a prompt into
shared memory and keep it there or not, `unpin` ends that; `purge` forgets what a tenant has stored,
or everything; `flush` writes what waits. A prompt that nobody has computed is computed for `warm`
and `pin` with one token behind it, as any request would be.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from serving.core.blocks import BLOCK_SIZE
from serving.core.prefix import prefix_keys, root_key
from serving.core.request import Request, SamplingParams
from serving.frontend import fields
from serving.frontend.auth import Principal
from serving.frontend.conversion import ServedModel
from serving.frontend.errors import ApiError, bad_request, decode_body, unavailable
from serving.frontend.gateway import Gateway
from serving.frontend.tokenization import tokenize
from serving.kv.store import tenant_id

ACTIONS = ("pin", "unpin", "warm", "purge", "flush")
_COMPUTE_S = 600.0
_STORED_S = 10.0
_POLL_S = 0.1
_ACTION_S = 60.0
_STATS_S = 2.0

Numbers = Mapping[str, float | int]


class CacheRefusal(Exception):
    """The process of the tiers does not answer, or not with numbers."""


AskTiers = Callable[[str, bytes | None, bytes, float], Awaitable[Numbers]]
"""Asks for something, for a tenant, about keys, within seconds; raises `CacheRefusal`."""


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """The way to the tiers of a server, and what its keys begin with.

    Attributes:
        ask: asks their process.
        fingerprint: of the model and the form of its bytes.
        salt_of: the salt of a tenant with keys; None if there is no such tenant.
    """

    ask: AskTiers
    fingerprint: bytes
    salt_of: Callable[[str], str | None]


class CacheAdmin:
    """Answers the route; `access` is None for a server without tiers."""

    def __init__(self, access: CacheAccess | None, gateway: Gateway, model: ServedModel) -> None:
        self._access = access
        self._gateway = gateway
        self._model = model

    async def stats(self) -> dict[str, Any]:
        """Numbers of the tiers.

        Raises:
            ApiError: 404, there are none; 503, their process does not answer.
        """
        try:
            return dict(await self._checked().ask("stats", None, b"", _STATS_S))
        except CacheRefusal as refusal:
            raise unavailable(str(refusal)) from None

    async def metrics(self) -> Numbers:
        """The same for scrapers; nothing where there are none."""
        try:
            return await self.stats()
        except ApiError:
            return {}

    async def act(self, raw: bytes) -> dict[str, Any]:
        """Do what a body asks for.

        Raises:
            ApiError: 400, the body cannot be used; 404, there are no tiers, no such tenant, or
                nothing of the prompt is stored; 503, somebody does not answer.
        """
        body = decode_body(raw)
        action = body.get("action")
        if action not in ACTIONS:
            expected = ", ".join(ACTIONS)
            raise bad_request(f"action is {action!r}; expected one of {expected}", "action")
        self._checked()
        salt = self._salt(body)
        if action == "flush":
            return dict(await self._ask("flush", None, b""))
        if action == "purge":
            return dict(await self._ask("purge", None if salt is None else tenant_id(salt), b""))
        named = msgspec.json.encode({"model": self._model.name, **body})
        tokens = tokenize(named, self._model)["tokens"]
        return await self._prefix(action, tokens, salt or "")

    async def _prefix(self, action: str, tokens: list[int], salt: str) -> dict[str, Any]:
        root = root_key(self._checked().fingerprint, salt)
        # One token is left to compute, or there is nothing to go on with.
        keys = prefix_keys(root, np.array(tokens[:-1], np.int32), BLOCK_SIZE)
        if not keys:
            raise bad_request(
                f"the prompt has {len(tokens)} tokens; expected at least {BLOCK_SIZE + 1}", "prompt"
            )
        data = b"".join(keys)
        answer: dict[str, Any] = {"tokens": BLOCK_SIZE * len(keys)}
        if action == "unpin":
            return answer | dict(await self._ask("unpin", None, data))
        found = await self._brought(action, salt, data)
        if found.get("blocks") != len(keys):
            await self._compute(tokens, salt)
            deadline = asyncio.get_running_loop().time() + _STORED_S
            while asyncio.get_running_loop().time() < deadline:
                found = await self._brought(action, salt, data)
                if found.get("blocks") == len(keys):
                    break
                await asyncio.sleep(_POLL_S)
        if not found:
            raise ApiError(404, "Nothing of this prompt is stored", "prompt", code="not_stored")
        return answer | dict(found)

    async def _brought(self, action: str, salt: str, data: bytes) -> Numbers:
        """What came of `pin` or `warm`; nothing if nothing is stored."""
        try:
            return await self._checked().ask(action, tenant_id(salt), data, _ACTION_S)
        except CacheRefusal as refusal:
            if "is stored" in str(refusal):
                return {}
            raise unavailable(str(refusal)) from None

    async def _compute(self, tokens: list[int], salt: str) -> None:
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = Request(f"warm-{secrets.token_hex(8)}", tuple(tokens), sampling, cache_salt=salt)
        stream = self._gateway.open([request])
        try:
            async with asyncio.timeout(_COMPUTE_S):
                await stream.admitted()
                while not any(update.finish_reason for update in await stream.next()):
                    pass
        except TimeoutError:
            raise unavailable("The prompt was not computed in time") from None
        finally:
            stream.close()

    def _salt(self, body: dict[str, Any]) -> str | None:
        """The salt of the prompts that a body is about; None for those of everybody."""
        tenant, own = body.get("tenant"), fields.cache_salt(body)
        if tenant is None:
            return own or None
        if not isinstance(tenant, str):
            raise bad_request(f"tenant is {tenant!r}; expected its name", "tenant")
        salt = self._checked().salt_of(tenant)
        if salt is None:
            raise ApiError(404, f"There is no tenant {tenant!r}", "tenant", code="no_such_tenant")
        return Principal(tenant, frozenset(), salt).salted(own)

    async def _ask(self, what: str, tenant: bytes | None, keys: bytes) -> Numbers:
        try:
            return await self._checked().ask(what, tenant, keys, _ACTION_S)
        except CacheRefusal as refusal:
            raise unavailable(str(refusal)) from None

    def _checked(self) -> CacheAccess:
        if self._access is None:
            detail = "This server keeps nothing beyond its device: kv.storage is 'off'"
            raise ApiError(404, detail, code="no_kv_tiers")
        return self._access
