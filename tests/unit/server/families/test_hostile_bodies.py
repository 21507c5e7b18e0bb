"""No body makes another server's API fail on its own account."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.bad_bodies import NOT_JSON

MESSAGES = [{"role": "user", "content": "hi"}]
VALID: dict[str, dict[str, Any]] = {
    "/": {"inputs": "hi"},
    "/generate": {"text": "hi", "sampling_params": {}},
    "/generate_stream": {"inputs": "hi", "parameters": {}},
    "/completion": {"prompt": "hi"},
    "/chat/completions": {"messages": MESSAGES},
    "/api/chat": {"model": "legal", "messages": MESSAGES},
    "/api/generate": {"model": "legal", "prompt": "hi"},
    "/api/show": {"model": "legal"},
    "/invocations": {"inputs": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/lora-adapters": {},
    "/load_lora_adapter": {"lora_name": "x", "lora_path": "/x"},
    "/adapters": {"name": "x", "src": "/x"},
}
FIELDS = (
    *("inputs", "parameters", "text", "input_ids", "sampling_params", "lora_path", "prompt"),
    *("messages", "model", "options", "input", "system", "tools", "lora", "stop", "logit_bias"),
    *("format", "metadata", "reasoning", "output_config", "stop_sequences", "n_probs", "stream"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 1.5, 10**30, "", "x" * 70, [], {}, [None], [[]], [{}], ["", 1], {"x": {}}),
    *([{"type": "text"}], [{"role": 1}], [{"role": "user", "content": [[]]}], {"type": []}),
    *([{"type": "function_call"}], {"temperature": -1}, {"stop": [""]}, {"merged_adapters": {}}),
    *([[1, "a"]], [True], {"effort": 5}, {"format": 5}, [{"role": "assistant", "content": None}]),
)

# The other bodies are JSON; their faults may be in fields that an API does not have.
NO_JSON = ("empty", "null", "number", "no JSON", "cut", "two values", "byte order mark")


@pytest.mark.parametrize("path", VALID)
def test_what_is_not_json_is_refused(path: str) -> None:
    app = make_app(allow_runtime_lora_updating=True)
    for what, body, *_ in NOT_JSON:
        response = post(app, path, body)
        if what in NO_JSON and path != "/generate_stream":
            assert 400 <= response.status_code < 500, what
        assert response.status_code < 500, f"{what}: {response.text}"
        # LoRAX's streams have their errors inside.
        assert path != "/generate_stream" or '"error_type":"validation"' in response.text


@pytest.mark.slow
@pytest.mark.parametrize("path", VALID)
def test_no_value_of_a_field_is_an_error_of_the_server(path: str) -> None:
    app = make_app(allow_runtime_lora_updating=True)
    for field in FIELDS:
        for value in VALUES:
            response = post(app, path, VALID[path] | {field: value})
            told = f"{field}={json.dumps(value)[:60]}: {response.text[:200]}"
            assert response.status_code < 500, told
            assert "its log has the reason" not in response.text, told
