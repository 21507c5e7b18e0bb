"""Adapters of a tenant with hostile tokenizer files neither freeze nor grow the server."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import httpx2
import pytest

from loramux.registry.keys import KeyRights
from loramux.registry.registry import Registry
from loramux.types.access import KeyScope
from tests.hostile_tokenizers import HOSTILE, make_hostile
from tests.integration.test_hostile_requests import MAX_BLOCKED_S, Seen, asking_version, rss_mib
from tests.registry_scene import Scene

OPERATOR = "operator-key"
MAX_GROWTH_MIB = 50
# What every tokenizer and every template meets.
TEXT = "a" * 64 + "b" + "x" * 64


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hostile_tokenizers_of_a_tenant_leave_others_alone(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.make_adapter("plain", seed=1)
    for number, edit in enumerate(HOSTILE.values()):
        folder = scene.adapters / f"h{number}"
        shutil.copytree(scene.adapters / "plain", folder)
        make_hostile(folder, tmp_path / "model", edit)
    with Registry(tmp_path / "registry.db") as registry:
        rights = KeyRights(tenant="mallory", scopes=frozenset(KeyScope))
        key = registry.access.create_key(rights).text
    flags = ("--registry", str(tmp_path / "registry.db"), "--api-key", OPERATOR)
    with scene.serving("hostile", *flags) as server:
        headers = {"authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=server.url, timeout=300, headers=headers) as client:
            assert push(client, "plain").status_code == 200
            assert answer(client, "mallory/plain")[0] == 200
            before, seen = rss_mib(server.process.pid), Seen()
            with asking_version(server, seen):
                refused = {name: attack(client, number) for number, name in enumerate(HOSTILE)}
            wrong = {name: found for name, found in refused.items() if not is_refusal(*found)}
            assert not wrong
            assert answer(client, "mallory/plain")[0] == 200
            time.sleep(0.5)
            assert rss_mib(server.process.pid) - before < MAX_GROWTH_MIB
        assert max(seen.blocked_s) < MAX_BLOCKED_S
        assert "Traceback" not in server.log.read_text(errors="replace")


def push(client: httpx2.Client, name: str) -> httpx2.Response:
    """Return the operator's key lets it read folders of the server; a tenant's names sources
    elsewhere.
    """
    body = {"reference": f"mallory/{name}@1.0.0", "source": name}
    headers = {"authorization": f"Bearer {OPERATOR}"}
    return client.post("/v1/adapters", json=body, headers=headers)


def is_refusal(status: int, text: str) -> bool:
    message = json.loads(text).get("error", {}).get("message", "")
    return 400 <= status < 500 and len(message) > 20 and "Errno" not in message


def attack(client: httpx2.Client, number: int) -> tuple[int, str]:
    """Pushes and uses an adapter; returns the first refusal, or the last answer."""
    pushed = push(client, f"h{number}")
    if pushed.status_code != 200:
        return pushed.status_code, pushed.text
    for _ in range(2):
        status, text = answer(client, f"mallory/h{number}")
        if status != 200:
            break
    return status, text


def answer(client: httpx2.Client, model: str) -> tuple[int, str]:
    messages = [{"role": "user", "content": TEXT}]
    body = {"model": model, "messages": messages, "max_tokens": 1}
    found = client.post("/v1/chat/completions", json=body)
    return found.status_code, found.text
