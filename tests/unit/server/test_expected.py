"""The contents that a router expects behind names, which the server checks."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.types.expected import EXPECT_HEADER, expected_text
from tests.unit.server.asgi_client import COMPLETIONS, make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend, named

LEGAL = named("legal").cid


def ask(app: Any, model: str, *, header: str) -> Any:
    body = {"model": model, "prompt": "hi", "max_tokens": 2}
    return post(app, COMPLETIONS, body, headers={EXPECT_HEADER: header})


@pytest.mark.parametrize(
    ("model", "expected", "status"),
    [
        ("legal", {"legal": [LEGAL]}, 200),
        ("legal", {"legal": ["peft:sha256:1", LEGAL]}, 200),
        ("legal", {"legal": ["peft:sha256:1"]}, 412),
        ("legal", {"team/polite": ["peft:sha256:1"]}, 200),
        # Unloaded elsewhere.
        ("legal", {"legal": []}, 404),
        ("0.5*legal+team/polite", {"legal": ["peft:sha256:1"]}, 412),
        ("tiny-base:legal", {"legal": ["peft:sha256:1"]}, 412),
        ("absent", {"absent": [LEGAL]}, 404),
        ("tiny-base", {"tiny-base": [LEGAL]}, 200),
    ],
)
def test_only_an_expected_content_answers(
    model: str, expected: dict[str, list[str]], status: int
) -> None:
    backend = ScriptedBackend()
    header = expected_text({name: frozenset(cids) for name, cids in expected.items()})
    reply = ask(make_app(backend), model, header=header)
    assert reply.status_code == status
    assert len(backend.requests) == (status == 200)


def test_a_header_that_cannot_be_read_is_refused() -> None:
    reply = ask(make_app(ScriptedBackend()), "legal", header="legal")
    assert reply.status_code == 400 and "name=cid" in reply.json()["error"]["message"]
