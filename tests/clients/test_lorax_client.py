"""LoRAX's own Python client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import Live
from tests.unit.server.scripted_backend import named

lorax = pytest.importorskip(
    "lorax", reason="the client is not installed: pip install -e '.[clients]'"
)
errors = pytest.importorskip("lorax.errors")
pytestmark = [
    pytest.mark.clients,
    # The client was written for an older pydantic.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Its sessions are never closed.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_generate_with_an_adapter_and_details(live: Live) -> None:
    client = lorax.Client(live.url)
    answer = client.generate(
        "hi", adapter_id="legal", max_new_tokens=20, seed=1, decoder_input_details=True
    )
    assert answer.generated_text == "Hello you"
    assert answer.details.finish_reason == "eos_token" and answer.details.prompt_tokens == 2
    assert [one.text for one in answer.details.prefill] == ["h", "i"]
    assert "".join(one.text for one in answer.details.tokens) == "Hello you"
    assert live.backend.cids == [named("legal").cid]
    assert live.backend.requests[0].params.is_greedy


def test_stream(live: Live) -> None:
    events = list(lorax.Client(live.url).generate_stream("hi", adapter_id="legal"))
    assert "".join(one.token.text for one in events if not one.token.special) == "Hello you"
    assert events[-1].generated_text == "Hello you"
    assert events[-1].details.generated_tokens == 9


def test_the_asynchronous_client(live: Live) -> None:
    async def work() -> tuple[str, str]:
        client = lorax.AsyncClient(live.url)
        whole = await client.generate("hi", adapter_id="legal")
        texts = [one.token.text async for one in client.generate_stream("hi")]
        return whole.generated_text, "".join(texts)

    assert asyncio.run(work()) == ("Hello you", "Hello you")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"adapter_id": "nope"}, "GenerationError"),
        ({"prompt": "x" * 70}, "ValidationError"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "ValidationError"),
    ],
)
def test_errors_have_the_clients_own_types(live: Live, arguments: Any, kind: str) -> None:
    client = lorax.Client(live.url)
    with pytest.raises(getattr(errors, kind)):
        client.generate(**{"prompt": "hi"} | arguments)
    if "response_format" not in arguments:
        with pytest.raises(getattr(errors, kind)):
            list(client.generate_stream(**{"prompt": "hi"} | arguments))


def test_merged_adapters_are_combined(live: Live) -> None:
    merged = lorax.types.MergedAdapters(
        ids=["legal", "team/polite"], weights=[0.5, 0.5], merge_strategy="linear", density=0.5
    )
    # This server has no maker of combinations: it says so, and does not answer as the base.
    with pytest.raises(errors.ValidationError, match="makes no combination by linear"):
        lorax.Client(live.url).generate("hi", merged_adapters=merged)
    assert live.backend.requests == []
