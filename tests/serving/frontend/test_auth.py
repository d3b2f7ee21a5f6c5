"""Goal: a key stands for its tenant as long as it is in force, is kept as a digest only, and cached
prefixes of tenants are apart unless both share theirs.

Method: a store in a temporary folder; headers as clients send them.
"""

from pathlib import Path

import pytest

from serving.frontend.auth import LOCAL, Authenticator, Principal, Scope, SqliteKeyStore
from serving.frontend.errors import ApiError
from sharding.config_file import ConfigError


@pytest.fixture
def store(tmp_path: Path) -> SqliteKeyStore:
    return SqliteKeyStore(tmp_path / "below" / "keys.sqlite3")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def status_of(authenticator: Authenticator, headers: dict[str, str], scope: Scope) -> int:
    with pytest.raises(ApiError) as caught:
        authenticator.principal(headers, scope)
    return caught.value.status


def test_without_keys_everybody_is_local(store: SqliteKeyStore) -> None:
    authenticator = Authenticator(store)
    assert not authenticator.needs_keys
    assert authenticator.principal({}, Scope.ADMIN) == LOCAL


def test_a_key_stands_for_its_tenant_until_it_is_revoked(store: SqliteKeyStore) -> None:
    authenticator = Authenticator(store)
    key_id, secret = store.add("acme", [Scope.USE], 7)
    authenticator.reload()
    for headers in (bearer(secret), {"authorization": f"bearer  {secret}"}, {"x-api-key": secret}):
        assert authenticator.principal(headers, Scope.USE).tenant == "acme"
    for headers in ({}, bearer(secret + "x"), {"authorization": secret}, bearer("")):
        assert status_of(authenticator, headers, Scope.USE) == 401
    assert status_of(authenticator, bearer(secret), Scope.ADMIN) == 403
    with pytest.raises(ApiError) as caught:
        authenticator.principal({}, Scope.USE)
    assert caught.value.headers == [(b"www-authenticate", b"Bearer")]
    assert store.revoke(key_id, 9) and not store.revoke(key_id, 10)
    assert authenticator.principal(bearer(secret), Scope.USE), "until it reloads"
    authenticator.reload()
    assert status_of(authenticator, bearer(secret), Scope.USE) == 401
    assert Authenticator(store).needs_keys, "a store with revoked keys only is not open"
    (entry,) = store.entries()
    assert (entry.created_s, entry.revoked_s, entry.scopes) == (7, 9, {Scope.USE})


def test_the_file_does_not_hold_the_key(store: SqliteKeyStore, tmp_path: Path) -> None:
    _, secret = store.add("acme", [Scope.USE], 0)
    content = (tmp_path / "below" / "keys.sqlite3").read_bytes()
    assert secret.encode() not in content and secret.removeprefix("dk-").encode() not in content


def test_salts_keep_tenants_apart_unless_both_share(store: SqliteKeyStore) -> None:
    for tenant, shares in (("a", False), ("b", False), ("c", True), ("d", True)):
        store.add(tenant, [Scope.USE], 0, shares_cache=shares)
    store.add("a", [Scope.ADMIN], 0)
    principals = list(store.principals().values())
    salts = {principal.tenant: principal.salted("x") for principal in principals}
    assert salts["a"] != salts["b"] and salts["c"] == salts["d"] == "x"
    assert len({p.salt for p in principals if p.tenant == "a"}) == 1, "one salt per tenant"
    one, other = Principal("a", frozenset(), "1:"), Principal("b", frozenset(), "1")
    assert one.salted("x") != other.salted(":x")


@pytest.mark.parametrize("tenant", ["", "local", "a b", "-a", "x" * 65])
def test_bad_names(store: SqliteKeyStore, tenant: str) -> None:
    with pytest.raises(ConfigError, match="tenant"):
        store.add(tenant, [Scope.USE], 0)


def test_unusable_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("this is no database, however long one reads it" * 50)
    with pytest.raises(ConfigError, match="cannot be used for keys"):
        Authenticator(SqliteKeyStore(path))


def test_digests_are_compared_as_a_whole(
    store: SqliteKeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, secret = store.add("acme", [Scope.USE], 0)
    authenticator = Authenticator(store)
    # Even if a wrong key were found in the place of a right one, it would not be taken for it.
    monkeypatch.setattr(Authenticator, "_place_of", lambda self, digest: b"same place")
    authenticator.reload()
    assert authenticator.principal(bearer(secret), Scope.USE).tenant == "acme"
    assert status_of(authenticator, bearer(secret[:-1]), Scope.USE) == 401
