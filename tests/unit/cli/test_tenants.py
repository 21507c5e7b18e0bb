"""`loramux tenants`, `usage`, `sign` and `audit`, on a registry of its own."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from loramux.base.signing import make_key_files
from loramux.registry.records import StoredReceipt
from tests.cli_factory import Shell

DAY_S = 86_400


def test_limits_of_a_tenant_are_set_shown_and_removed(shell: Shell) -> None:
    flags = ["--limit", "requests-per-minute=60", "--limit", "max_rank=8", "--share", "2.5"]
    shell.ok("tenants", "set", "acme", *flags, "--require-signed")
    shown = shell.json("tenants", "show", "acme")
    assert shown["limits"] == {"requests_per_minute": 60, "max_rank": 8}
    assert (shown["share"], shown["require_signed"]) == (2.5, True)
    shell.ok("tenants", "set", "acme", "--limit", "max_rank=none", "--no-require-signed")
    (listed,) = shell.json("tenants", "list")["tenants"]
    assert listed["limits"] == {"requests_per_minute": 60} and listed["share"] == 2.5
    assert "requests_per_minute=60" in shell.ok("tenants", "list")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--limit", "speed=1"], "no limit"),
        (["--limit", "max_rank=-1"], "not a limit"),
        (["--share", "0"], "share"),
        (["--add-signer", __file__], "public key"),
        (["--remove-signer", "f" * 16], "no signing key"),
    ],
)
def test_invalid_settings_change_nothing(shell: Shell, flags: list[str], said: str) -> None:
    result = shell.run("tenants", "set", "acme", *flags)
    assert result.exit_code in (1, 2) and said in result.stderr
    assert shell.json("tenants", "list") == {"tenants": []}


def test_a_push_over_the_tenants_limits_is_refused_and_the_same_again_is_not(shell: Shell) -> None:
    shell.ok("tenants", "set", "alice", "--limit", "adapters=1")
    shell.push("alice/one@1.0.0", 1)
    result = shell.run("push", shell.adapter(2), "alice/two@1.0.0")
    assert result.exit_code == 1 and "1 stored adapters" in result.stderr
    assert "0 are left" in result.stderr and len(shell.json("list")["adapters"]) == 1
    shell.push("alice/one@1.0.0", 1)
    shell.push("alice/one@1.1.0", 2)


def test_signed_pushes(shell: Shell, tmp_path: Path) -> None:
    key, other = tmp_path / "acme.pem", tmp_path / "other.pem"
    for path in (key, other):
        make_key_files(path)
    folder = shell.adapter(1)
    shell.ok("tenants", "set", "acme", "--require-signed", "--add-signer", f"{key}.pub")
    (signer,) = shell.json("tenants", "show", "acme")["signing_keys"]
    assert signer["name"] == "acme.pem"
    refused = shell.run("push", folder, "acme/sql@1.0.0")
    assert refused.exit_code == 1 and "no signature" in refused.stderr
    refused = shell.run("push", folder, "acme/sql@1.0.0", "--sign", other)
    assert refused.exit_code == 1 and "No signing key" in refused.stderr
    assert signer["key_id"] in shell.ok("push", folder, "acme/sql@1.0.0", "--sign", key)
    shown = shell.json("show", "acme/sql@1.0.0")["versions"][0]
    assert shown["signed_by"] == signer["key_id"] and shown["sources"] == [str(folder)]
    assert signer["key_id"] in shell.ok("show", "acme/sql@1.0.0")

    signed = shell.adapter(2)
    shell.run_bare("sign", signed, "--key", key)
    shell.ok("push", signed, "acme/sql@1.1.0")
    weights = signed / "adapter_model.safetensors"
    shutil.copy(shell.adapter(3) / weights.name, weights)
    changed = shell.run("push", signed, "acme/sql@1.2.0")
    assert changed.exit_code == 1 and "No signing key" in changed.stderr


def test_a_signature_of_another_program_and_a_bundle_of_it(shell: Shell, tmp_path: Path) -> None:
    """The bytes to sign are printed; any program may sign them with ECDSA P-256, as cosign does."""
    import base64

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, key = shell.adapter(1), ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "cosign.pub").write_bytes(public)
    message = shell.run_bare("sign", folder, "--print-manifest").stdout_bytes
    signature = base64.b64encode(key.sign(message, ec.ECDSA(hashes.SHA256()))).decode()
    shell.ok("tenants", "set", "acme", "--add-signer", tmp_path / "cosign.pub")
    for number, bundle in enumerate(
        ({"messageSignature": {"signature": signature}}, {"base64Signature": signature})
    ):
        file = tmp_path / f"bundle-{number}.json"
        file.write_text(json.dumps(bundle))
        shell.ok("push", folder, f"acme/sql@1.{number}.0", "--signature", file)
    (tmp_path / "empty.json").write_text("{}")
    refused = shell.run("push", folder, "acme/sql", "--signature", tmp_path / "empty.json")
    assert refused.exit_code == 1 and "holds no signature" in refused.stderr
    assert shell.run("push", folder, "acme/sql", "--signature", tmp_path / "none").exit_code == 2


def use(shell: Shell, day: int, tenant: str, adapter: str, tokens: int) -> None:
    body = {
        "api_key_id": "k1",
        "status": "completed",
        "prompt_tokens": tokens,
        "completion_tokens": 2,
        "adapters": [{"tenant": tenant, "name": adapter, "cid": "c"}],
    }
    receipt = StoredReceipt(
        id=f"r-{day}-{tenant}-{adapter}-{tokens}",
        created_at=day * DAY_S + 5.0,
        tenant=tenant,
        cid=None,
        latency_ms=1.0,
        is_cold=False,
        body=body,
    )
    shell.in_library(lambda library: library.registry.add_receipts([receipt]))


def test_usage_by_day_adapter_and_key_as_table_json_and_csv(shell: Shell) -> None:
    for day, tenant, adapter, tokens in (
        (20_000, "acme", "sql", 10),
        (20_000, "acme", "sql", 20),
        (20_001, "acme", "chat", 5),
        (20_001, "=SUM(1)", "chat", 5),
        (20_000, "globex", "chat", 7),
        (19_000, "acme", "sql", 100),
    ):
        use(shell, day, tenant, adapter, tokens)
    days = ["--since", "2024-10-04", "--until", "2024-10-05"]
    found = shell.json("usage", *days, "--tenant", "acme")["usage"]
    assert [
        (one["day"], one["adapter"], one["requests"], one["prompt_tokens"]) for one in found
    ] == [
        ("2024-10-04", "acme/sql", 2, 30),
        ("2024-10-05", "acme/chat", 1, 5),
    ]
    rows = list(csv.DictReader(io.StringIO(shell.ok("usage", *days, "--csv"))))
    assert [(row["tenant"], row["output_tokens"]) for row in rows] == [
        *(("acme", "4"), ("globex", "2"), ("'=SUM(1)", "2"), ("acme", "2"))
    ]
    assert "globex/chat" in shell.ok("usage", *days)
    assert shell.json("usage")["usage"] == []
    assert shell.run("usage", "--since", "yesterday").exit_code == 2
    assert shell.run("usage", *reversed(days)).exit_code == 2


def test_changes_are_logged_with_their_user_and_verified(shell: Shell) -> None:
    shell.push("alice/sql@1.0.0", 1)
    shell.ok("promote", "alice/sql@1.0.0")
    made = shell.json("keys", "create", "--tenant", "alice")
    shell.ok("share", "alice/sql", "--with", "globex")
    assert shell.run("rollback", "alice/sql").exit_code == 1
    shell.ok("tenants", "set", "alice", "--limit", "adapters=3")
    shell.ok("gc", "--grace-s", "0")
    entries = shell.json("audit", "list")["entries"]
    assert [(one["action"], one["result"]) for one in reversed(entries)] == [
        ("push", "ok"),
        ("promote", "ok"),
        ("key.create", "ok"),
        ("share", "ok"),
        ("rollback", "refused"),
        ("tenant.set", "ok"),
        ("gc", "ok"),
    ]
    assert all("@" in one["actor"]["address"] for one in entries)
    assert made["key"] not in json.dumps(entries)
    (promoted,) = shell.json("audit", "list", "--action", "promote")["entries"]
    assert promoted["target"] == "alice/sql@prod" and promoted["tenant"] == "alice"
    assert "alice/sql@prod" in shell.ok("audit", "list")
    assert shell.json("audit", "verify")["is_sound"]


def test_a_changed_entry_and_a_cut_end_are_found(shell: Shell, tmp_path: Path) -> None:
    for version in ("1.0.0", "1.1.0", "1.2.0"):
        shell.push(f"alice/sql@{version}", 1)
    head = shell.json("audit", "verify")["head"]
    anchor = tmp_path / "anchor"
    anchor.write_text(json.dumps({"format": "loramux-audit/1", **head}))
    assert shell.json("audit", "verify", "--anchor", anchor)["is_sound"]
    with sqlite3.connect(shell.data / "registry.db") as database:
        database.execute("UPDATE audit_entries SET target = 'alice/other@1.1.0' WHERE number = 2")
    result = shell.run("audit", "verify")
    assert result.exit_code == 1 and "Entry 2 was changed" in result.stdout
    with sqlite3.connect(shell.data / "registry.db") as database:
        database.execute("DELETE FROM audit_entries WHERE number = 3")
    result = shell.run("audit", "verify", "--anchor", anchor)
    assert result.exit_code == 1 and "cut off" in result.stdout


def test_sign_needs_a_key_or_prints_the_manifest(shell: Shell, tmp_path: Path) -> None:
    assert shell.run_bare("sign", shell.adapter()).exit_code == 2
    assert shell.run_bare("sign", tmp_path / "none", "--print-manifest").exit_code == 1
