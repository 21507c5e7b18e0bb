"""Anthropic's Python client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import Live
from tests.unit.server.scripted_backend import named

anthropic = pytest.importorskip(
    "anthropic", reason="the client is not installed: pip install -e '.[clients]'"
)
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def client_of(live: Live) -> Any:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


def test_a_message(live: Live) -> None:
    answer = client_of(live).messages.create(
        model="legal", max_tokens=20, messages=MESSAGES, system="be"
    )
    assert answer.content[0].text == "Hello you"
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 9)
    assert live.backend.cids == [named("legal").cid]


def test_a_stream(live: Live) -> None:
    with client_of(live).messages.stream(model="legal", max_tokens=20, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == "Hello you"
        assert stream.get_final_message().usage.output_tokens == 9


def test_count_tokens(live: Live) -> None:
    counted = client_of(live).messages.count_tokens(model="legal", messages=MESSAGES)
    assert counted.input_tokens == 7


def test_errors_have_the_clients_own_types(live: Live) -> None:
    client = client_of(live)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nope", max_tokens=2, messages=MESSAGES)
    long: Any = [{"role": "user", "content": "x" * 70}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="legal", max_tokens=2, messages=long)
