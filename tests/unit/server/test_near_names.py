"""B7: texts of errors: names like a misspelt one, unloaded adapters, and grammars."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loramux.server.generate.selection import nearest
from tests.unit.server.asgi_client import complete, make_app, post
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import ScriptedBackend


def message(app: Any, model: str, **arguments: Any) -> str:
    body = {"model": model, "prompt": "x"}
    response = post(app, "/v1/completions", body, **arguments)
    assert response.status_code == 404, response.text
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("pirat", ["pirate"]),
        ("priate", ["pirate"]),
        ("pirates", ["pirate"]),
        ("pyrate", ["pirate"]),
        ("Pirate", ["pirate"]),
        ("pirate:latest", ["pirate"]),
        ("sql", ["acme/sql"]),
        ("acme/sq", ["acme/sql"]),
        ("other/sql@1.0.0", ["acme/sql"]),
        ("zebra", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("num_others", [0, 5000])
def test_names_that_are_one_slip_away(text: str, near: list[str], num_others: int) -> None:
    others = [f"adapter-{number:05}" for number in range(num_others)]
    assert nearest(text, ["pirate", "acme/sql", *others]) == near


def test_a_misspelt_name_gets_the_nearest() -> None:
    app = make_app()
    assert message(app, "leagl").endswith("Did you mean legal?")
    assert message(app, "legal+0.5*polit").endswith("Did you mean team/polite?")
    assert message(app, "something-else") == "The model `something-else` does not exist."
    assert "Did you mean" not in message(app, "legal" * 500)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"model": "leagl", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"model": "leagl", "max_tokens": 5, "messages": [
            {"role": "user", "content": "x"}]}),
        ("/generate", {"inputs": "x", "parameters": {"adapter_id": "leagl"}}),
        ("/generate", {"text": "x", "lora_path": "leagl"}),
    ],
)  # fmt: skip
def test_other_apis_name_the_nearest_too(path: str, body: Any) -> None:
    response = post(make_app(), path, body)
    assert response.status_code in (400, 404, 424) and "Did you mean legal?" in response.text


def test_an_unloaded_adapter_is_said_to_be() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    asyncio.run(backend.names.unload("legal"))
    assert "It was unloaded at 20" in message(app, "legal")
    assert "unloaded" not in message(app, "lega")
    backend.give_name("legal", next(iter(backend.adapters.values())))
    assert complete(app, model="legal").status_code == 200


def test_a_tenant_reads_of_its_own_names_alone(registry_app: Make) -> None:
    served = registry_app(served_model_names=("tiny-base",))
    served.push("acme/secret@1.0.0", 1)
    served.push("umbrella/secrets@1.0.0", 2)
    served.backend.give_name("secrex", next(iter(served.backend.adapters.values())))
    keys = {tenant: served.key(tenant) for tenant in ("acme", "umbrella", "initech", None)}
    served.adapters.follow_access()
    said = {tenant: message(served.app, "secret5", headers=key) for tenant, key in keys.items()}
    assert said["acme"].endswith("Did you mean acme/secret?")
    assert said["umbrella"].endswith("Did you mean umbrella/secrets?")
    assert said["initech"] == "The model `secret5` does not exist."
    assert "acme/secret" in said[None] and "umbrella/secrets" in said[None]


def test_a_tenant_does_not_read_that_a_name_of_others_was_unloaded(registry_app: Make) -> None:
    served = registry_app(served_model_names=("tiny-base",))
    key = served.key("acme")
    served.adapters.follow_access()
    asyncio.run(served.backend.names.unload("legal"))
    assert message(served.app, "legal", headers=key) == "The model `legal` does not exist."


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"guided_regex": "(a"}, "Correct the grammar."),
        ({"guided_regex": "(?=a)b"}, "Leave this part out."),
        ({"guided_grammar": "start: ("}, "Correct the grammar."),
        ({"guided_json": {"type": "objct"}}, "Correct the schema."),
        ({"guided_json": {"not": {"type": "string"}}}, "Leave this part out."),
    ],
)
def test_a_syntax_error_is_to_be_corrected(fields: Any, fix: str) -> None:
    error = complete(make_app(), **fields).json()["error"]
    assert error["code"] == 400 and error["message"].endswith(fix)
