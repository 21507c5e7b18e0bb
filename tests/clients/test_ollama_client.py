"""Ollama's Python client."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Live
from tests.unit.server.scripted_backend import named

ollama = pytest.importorskip(
    "ollama", reason="the client is not installed: pip install -e '.[clients]'"
)
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat_and_generate(live: Live) -> None:
    client = ollama.Client(live.url)
    answer = client.chat("legal:latest", MESSAGES, options={"temperature": 0})
    assert (answer.message.content, answer.done_reason, answer.eval_count) == (
        "Hello you",
        "stop",
        9,
    )
    assert client.generate("legal", "hi").response == "Hello you"
    assert live.backend.cids == [named("legal").cid] * 2


def test_streams(live: Live) -> None:
    client = ollama.Client(live.url)
    parts = list(client.chat("legal", MESSAGES, stream=True))
    assert "".join(part.message.content for part in parts) == "Hello you" and parts[-1].done
    assert (
        "".join(part.response for part in client.generate("legal", "hi", stream=True))
        == "Hello you"
    )


def test_models(live: Live) -> None:
    client = ollama.Client(live.url)
    assert [one.model for one in client.list().models] == ["tiny-base", "legal", "team/polite"]
    assert client.show("legal").capabilities == ["completion"]
    assert [one.model for one in client.ps().models] == ["tiny-base"]


def test_errors_have_the_clients_own_type(live: Live) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as raised:
        ollama.Client(live.url).chat("nope", MESSAGES)
    assert raised.value.status_code == 404
