"""The OpenAPI document, and what schemathesis finds when it takes it at its word."""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from jsonschema_rs import validator_for
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.unit.server.asgi_client import chat, make_app, post

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]

schema = schemathesis.openapi.from_asgi("/openapi.json", make_app())
# Its thousands of bodies, each with one boundary value, take most of the time; drawn bodies have
# such values too.
schema.config.phases.coverage.enabled = os.environ.get("LORAMUX_HYPOTHESIS") == "full"


@schema.parametrize()
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_server_error_and_no_undocumented_answer(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)


def test_every_reference_in_the_document_resolves() -> None:
    document = make_app().document.document
    names = document["components"]["schemas"].keys()
    pieces = str(document).split("#/components/schemas/")[1:]
    assert {piece.split("'")[0] for piece in pieces} <= names


def test_answers_match_their_documented_shape() -> None:
    document = make_app().document.document
    answer = chat(make_app(), logprobs=True, top_logprobs=1).json()
    shape = {"$ref": "#/components/schemas/ChatCompletion", "components": document["components"]}
    validator_for(shape).validate(answer)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_documented_example_is_answered(path: str) -> None:
    content = make_app().document.document["paths"][path]["post"]["requestBody"]["content"]
    assert post(make_app(), path, content["application/json"]["example"]).status_code == 200


def test_fields_are_explained_by_name() -> None:
    properties = make_app().document.document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "adapters", "adapter_weights", "stream_options"} <= properties.keys()
