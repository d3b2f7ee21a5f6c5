"""API keys: who may call, for which tenant, and what that tenant's cached prefixes are salted with.

A key is 32 random bytes in text; what is kept is its SHA-256 digest. *Why* no slow hash: those are
for secrets that people choose, and nobody can try out 2**256 keys. Digests are found under a hash
with a secret of this process and then compared in constant time, so times tell nothing of them.

A server reads the keys once and again when told to, so that no call waits for the database.
"""

import enum
import hashlib
import hmac
import re
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from serving.frontend.errors import ApiError
from sharding.config_file import ConfigError

LOCAL_TENANT = "local"
"""Whose requests are those of a server without keys."""

_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEY_HEAD = "dk-"
_BUSY_S = 10.0


class Scope(enum.Enum):
    """What a key allows: `use` the model, or see and change the server (`admin`)."""

    USE = "use"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. `salt` separates the cached prefixes of the tenant from those of others."""

    tenant: str
    scopes: frozenset[Scope]
    salt: str = ""

    def salted(self, cache_salt: str) -> str:
        """A request's own salt within the tenant's; no two pairs give the same text."""
        if not self.salt:
            return cache_salt
        return f"{len(self.salt)}:{self.salt}{cache_salt}"


LOCAL = Principal(LOCAL_TENANT, frozenset(Scope))


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """What is known of a key besides its digest; times are seconds since 1970."""

    key_id: str
    tenant: str
    scopes: frozenset[Scope]
    created_s: int
    revoked_s: int | None


class KeyStore(Protocol):
    """Where keys are kept."""

    def add(
        self, tenant: str, scopes: Iterable[Scope], now_s: int, *, shares_cache: bool = False
    ) -> tuple[str, str]:
        """Makes a key; returns its id and the key itself, which cannot be had again."""
        ...

    def entries(self) -> list[KeyEntry]:
        """Every key, revoked ones included, oldest first."""
        ...

    def revoke(self, key_id: str, now_s: int) -> bool:
        """Ends a key; False if there is none of that id in force."""
        ...

    def principals(self) -> Mapping[bytes, Principal]:
        """Whom each key in force stands for, by its digest."""
        ...


class SqliteKeyStore:
    """Keys in a table of a SQLite file, which is made when it is first written to.

    Raises:
        ConfigError: by every method, the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(
        self, tenant: str, scopes: Iterable[Scope], now_s: int, *, shares_cache: bool = False
    ) -> tuple[str, str]:
        """Makes a key; returns its id and the key itself, which cannot be had again.

        The first key of a tenant settles whether the tenant's prefixes are shared with others
        that share theirs too.
        """
        if not _TENANT_NAME.fullmatch(tenant) or tenant == LOCAL_TENANT:
            raise ConfigError(
                f"tenant {tenant!r}: expected up to 64 letters, digits, dots, dashes and "
                f"underscores, and not {LOCAL_TENANT}, which means a server without keys"
            )
        key_id = secrets.token_hex(4)
        secret = f"{_KEY_HEAD}{secrets.token_urlsafe(32)}"
        salt = "" if shares_cache else secrets.token_hex(16)
        with self._opened() as database:
            database.execute("INSERT OR IGNORE INTO tenants VALUES (?, ?)", (tenant, salt))
            names = ",".join(sorted(scope.value for scope in scopes))
            row = (key_id, digest_of(secret), tenant, names, now_s, None)
            database.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?)", row)
        return key_id, secret

    def entries(self) -> list[KeyEntry]:
        """Every key, revoked ones included, oldest first."""
        if not self._path.exists():
            return []
        with self._opened() as database:
            rows = database.execute(
                "SELECT key_id, tenant, scopes, created_s, revoked_s FROM keys ORDER BY rowid"
            ).fetchall()
        return [KeyEntry(row[0], row[1], _scopes(row[2]), row[3], row[4]) for row in rows]

    def revoke(self, key_id: str, now_s: int) -> bool:
        """Ends a key; False if there is none of that id in force."""
        with self._opened() as database:
            changed = database.execute(
                "UPDATE keys SET revoked_s = ? WHERE key_id = ? AND revoked_s IS NULL",
                (now_s, key_id),
            )
            return changed.rowcount == 1

    def principals(self) -> Mapping[bytes, Principal]:
        """Whom each key in force stands for, by its digest."""
        if not self._path.exists():
            return {}
        with self._opened() as database:
            rows = database.execute(
                "SELECT digest, tenant, scopes, salt FROM keys JOIN tenants USING (tenant) "
                "WHERE revoked_s IS NULL"
            ).fetchall()
        return {row[0]: Principal(row[1], _scopes(row[2]), row[3]) for row in rows}

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as database, database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS tenants (tenant TEXT PRIMARY KEY, salt TEXT)"
                )
                database.execute(
                    "CREATE TABLE IF NOT EXISTS keys (key_id TEXT PRIMARY KEY, digest BLOB UNIQUE, "
                    "tenant TEXT, scopes TEXT, created_s INTEGER, revoked_s INTEGER)"
                )
                yield database
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{self._path}: cannot be used for keys: {error}") from None


class Authenticator:
    """Tells who calls, by the keys that were in force at the last `reload`.

    A store that has never held a key leaves the server open to this machine: everybody is `LOCAL`.
    Once it has, it stays closed, even if every key is revoked.
    """

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._secret = secrets.token_bytes(32)
        self._principals: dict[bytes, tuple[bytes, Principal]] = {}
        self.needs_keys = False
        self.reload()

    def reload(self) -> None:
        """Reads the keys again.

        Raises:
            ConfigError: the store cannot be used; the keys stay as they were.
        """
        needs_keys = bool(self._store.entries())
        self._principals = {
            self._place_of(digest): (digest, principal)
            for digest, principal in self._store.principals().items()
        }
        self.needs_keys = self.needs_keys or needs_keys

    def principal(self, headers: Mapping[str, str], scope: Scope) -> Principal:
        """Who calls, by `Authorization: Bearer KEY` or `x-api-key: KEY`.

        Raises:
            ApiError: 401, no key or one that is not in force; 403, one without the scope.
        """
        if not self.needs_keys:
            return LOCAL
        kind, _, secret = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            secret = ""
        secret = secret.strip() or headers.get("x-api-key", "")
        if not secret:
            raise _unauthorized("No API key; expected a header Authorization: Bearer KEY")
        digest = digest_of(secret)
        known, principal = self._principals.get(self._place_of(digest), (b"", None))
        if principal is None or not hmac.compare_digest(known, digest):
            raise _unauthorized("This API key is not in force")
        if scope not in principal.scopes:
            detail = f"This API key lacks the scope {scope.value}"
            raise ApiError(403, detail, code="insufficient_permissions")
        return principal

    def salt_of(self, tenant: str) -> str | None:
        """The salt of a tenant that has keys in force; None if there is none."""
        principals = (principal for _, principal in self._principals.values())
        return next((one.salt for one in principals if one.tenant == tenant), None)

    def _place_of(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret).digest()


def digest_of(secret: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _scopes(names: str) -> frozenset[Scope]:
    return frozenset(Scope(name) for name in names.split(",") if name)


def _unauthorized(detail: str) -> ApiError:
    error = ApiError(401, detail, code="invalid_api_key")
    error.headers.append((b"www-authenticate", b"Bearer"))
    return error
