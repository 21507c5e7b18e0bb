"""text-generation, and huggingface_hub's InferenceClient."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import InferenceClient

from tests.clients.conftest import Live
from tests.unit.server.scripted_backend import named

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def text_generation() -> Any:
    return pytest.importorskip(
        "text_generation", reason="the client is not installed: pip install -e '.[clients]'"
    )


def test_generate(text_generation: Any, live: Live) -> None:
    client = text_generation.Client(live.url)
    answer = client.generate("hi", max_new_tokens=20, decoder_input_details=True, top_n_tokens=1)
    assert answer.generated_text == "Hello you"
    assert answer.details.generated_tokens == 9
    assert [one.id for one in answer.details.prefill] == list(b"hi")


def test_best_of(text_generation: Any, live: Live) -> None:
    answer = text_generation.Client(live.url).generate("hi", best_of=2, do_sample=True)
    assert len(answer.details.best_of_sequences) == 1


def test_stream(text_generation: Any, live: Live) -> None:
    events = list(text_generation.Client(live.url).generate_stream("hi"))
    assert "".join(one.token.text for one in events) == "Hello you"
    assert events[-1].details.finish_reason == "eos_token"


def test_chat_without_a_model(text_generation: Any, live: Live) -> None:
    answer = text_generation.Client(live.url).chat(
        messages=[{"role": "user", "content": "hi"}], max_tokens=20
    )
    assert answer.choices[0].message.content == "Hello you"


def test_errors_have_the_clients_own_types(text_generation: Any, live: Live) -> None:
    with pytest.raises(text_generation.errors.ValidationError):
        text_generation.Client(live.url).generate("x" * 70)


@pytest.fixture
def hub_client(live: Live, monkeypatch: pytest.MonkeyPatch) -> InferenceClient:
    """It sends nothing, not even to this machine, while the tests keep the hub's client offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return InferenceClient(live.url)


def test_inference_client(live: Live, hub_client: InferenceClient) -> None:
    client = hub_client
    assert client.text_generation("hi", adapter_id="legal") == "Hello you"
    assert "".join(client.text_generation("hi", stream=True)) == "Hello you"
    details = client.text_generation("hi", details=True, return_full_text=True)
    assert details.generated_text == "hiHello you"
    assert details.details.finish_reason == "eos_token"
    events = list(client.text_generation("hi", stream=True, details=True))
    assert events[-1].details.generated_tokens == 9
    assert live.backend.cids[0] == named("legal").cid


def test_inference_client_chats_without_a_model(hub_client: InferenceClient) -> None:
    answer = hub_client.chat_completion([{"role": "user", "content": "hi"}], max_tokens=20)
    assert answer.choices[0].message.content == "Hello you"
