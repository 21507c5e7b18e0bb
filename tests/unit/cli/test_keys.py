"""`loramux keys` and `loramux share`, on a registry of its own."""

from __future__ import annotations

import sqlite3

import pytest

from loramux.registry.keys import parse_key
from tests.cli_factory import Shell


def test_a_key_is_shown_once_and_stored_as_a_hash(shell: Shell) -> None:
    result = shell.run("keys", "create", "--tenant", "acme", "--note", "CI")
    key = result.stdout.strip()
    parsed = parse_key(key)
    assert parsed is not None and parsed[0] in result.stderr
    (listed,) = shell.json("keys", "list")["keys"]
    assert (listed["id"], listed["tenant"], listed["scopes"]) == (parsed[0], "acme", ["infer"])
    assert listed["state"] == "active" and listed["ends_at"] is None
    assert key not in shell.ok("keys", "list") and parsed[1] not in str(listed)
    assert parsed[1].encode() not in b"".join(
        path.read_bytes() for path in shell.data.rglob("*") if path.is_file()
    )


def test_rights_of_a_key(shell: Shell) -> None:
    flags = ["--scope", "push", "--scope", "infer", "--adapters", "sql-*", "--no-base"]
    made = shell.json("keys", "create", *flags, "--expires", "2h", "--limit", "max-rank=8")
    assert made["key"].startswith(f"lmx_{made['id']}_")
    assert (made["scopes"], made["adapters"]) == (["infer", "push"], ["sql-*"])
    assert not made["may_use_base"] and made["tenant"] is None
    assert made["ends_at"] == pytest.approx(made["created_at"] + 7200)
    limits = shell.in_library(lambda library: library.registry.tenants.rate_limits()[1])
    assert limits[made["id"]].max_rank == 8


def test_rotate_and_revoke(shell: Shell) -> None:
    old = shell.json("keys", "create", "--tenant", "acme")
    new = shell.json("keys", "rotate", old["id"], "--overlap", "1d")
    states = {key["id"]: key["state"] for key in shell.json("keys", "list")["keys"]}
    assert states == {old["id"]: "active", new["id"]: "active"}
    shell.ok("keys", "revoke", new["id"])
    shell.ok("keys", "rotate", old["id"])
    states = {key["id"]: key["state"] for key in shell.json("keys", "list")["keys"]}
    assert (states[old["id"]], states[new["id"]]) == ("revoked", "revoked")
    assert shell.run("keys", "revoke", new["id"]).exit_code == 1
    assert "no valid key" in shell.run("keys", "revoke", "f" * 12).stderr


def test_keys_of_older_servers_without_a_sensible_end_are_listed(shell: Shell) -> None:
    key_id = shell.json("keys", "create", "--tenant", "acme")["id"]
    for end in (1e308, 1e12):
        with sqlite3.connect(shell.data / "registry.db") as database:
            database.execute("UPDATE api_keys SET expires_at = ?", (end,))
        database.close()
        assert "9999" in shell.ok("keys", "list")
        assert shell.json("keys", "list")["keys"][0]["ends_at"] == end
    rotated = shell.json("keys", "rotate", key_id)
    assert rotated["ends_at"] - rotated["created_at"] < 101 * 366 * 86_400


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--scope", "infr"], "Did you mean infer"),
        (["--expires", "soon"], "not a time"),
        (["--expires", "999999999d"], "100 years"),
        (["--limit", "speed=1"], "no limit"),
        (["--limit", "max_rank"], "not a limit"),
        (["--tenant", "a/b"], "tenant"),
        (["--adapters", "a b"], "pattern"),
    ],
)
def test_invalid_options_make_no_key(shell: Shell, flags: list[str], said: str) -> None:
    result = shell.run("keys", "create", *flags)
    assert result.exit_code == 2 and said in result.stderr
    assert shell.json("keys", "list")["keys"] == []


def test_shares_of_all_versions_and_of_one(shell: Shell) -> None:
    shell.push("acme/sql@1.0.0")
    shell.ok("share", "acme/sql@1.0.0", "--with", "globex")
    shell.ok("share", "acme/sql", "--with", "*")
    found = [(one["version"], one["with"]) for one in shell.json("shares")["shares"]]
    assert found == [(None, "*"), ("1.0.0", "globex")]
    assert "globex" in shell.ok("shares", "acme") and "sql" not in shell.ok("shares", "umbrella")
    shell.ok("unshare", "acme/sql", "--with", "globex")
    assert [one["with"] for one in shell.json("shares")["shares"]] == ["*"]
    assert shell.run("share", "acme/sql@prod", "--with", "globex").exit_code == 2
    assert shell.run("share", "acme/other", "--with", "globex").exit_code == 1
    assert shell.run("share", "acme/sql@2.0.0", "--with", "globex").exit_code == 1
