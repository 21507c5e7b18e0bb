"""LoRAX's own Python client."""

from __future__ import annotations

import asyncio
from typing import Any

import lorax
import pytest
from lorax import errors
from lorax.types import MergedAdapters

from tests.clients.live import RANDOM_ADAPTERS, Live
from tests.clients.schemas import City

CLIENT = "lorax-client"
shows = pytest.mark.shows
PROMPT = "Once upon a time"


@pytest.fixture
def client(live: Live) -> lorax.Client:
    return lorax.Client(live.url, timeout=120)


@shows("text", "adapters")
def test_generate_with_an_adapter_and_details(client: lorax.Client, live: Live) -> None:
    answer = client.generate(
        PROMPT, adapter_id="pirate", max_new_tokens=8, seed=1, decoder_input_details=True
    )
    assert answer.generated_text == live.completion(PROMPT, "pirate")
    assert answer.generated_text != client.generate(PROMPT, max_new_tokens=8).generated_text
    details = answer.details
    assert (details.finish_reason, details.generated_tokens) == ("length", 8)
    assert "".join(one.text for one in details.prefill) == PROMPT
    assert "".join(one.text for one in details.tokens) == answer.generated_text


@shows("stream")
def test_stream(client: lorax.Client, live: Live) -> None:
    events = list(client.generate_stream(PROMPT, adapter_id="pirate", max_new_tokens=8))
    text = live.completion(PROMPT, "pirate")
    assert "".join(one.token.text for one in events) == text == events[-1].generated_text
    assert events[-1].details.generated_tokens == 8


@shows("text", "stream")
def test_the_asynchronous_client(live: Live) -> None:
    async def work() -> tuple[str, str]:
        client = lorax.AsyncClient(live.url, timeout=120)
        whole = await client.generate(PROMPT, adapter_id="pirate", max_new_tokens=8)
        asked = client.generate_stream(PROMPT, adapter_id="pirate", max_new_tokens=8)
        return whole.generated_text, "".join([one.token.text async for one in asked])

    text = live.completion(PROMPT, "pirate")
    assert asyncio.run(work()) == (text, text)


@shows("adapters")
@pytest.mark.parametrize("strategy", ["linear", "ties", "dare_linear", "dare_ties"])
def test_merged_adapters(client: lorax.Client, live: Live, strategy: str) -> None:
    merged = MergedAdapters(
        ids=RANDOM_ADAPTERS, weights=[0.7, 0.4], merge_strategy=strategy, density=0.5
    )
    answer = client.generate(PROMPT, merged_adapters=merged, max_new_tokens=8)
    own = {"combination": strategy} | ({} if strategy == "linear" else {"density": 0.5})
    chosen = {"adapters": RANDOM_ADAPTERS, "adapter_weights": [0.7, 0.4]}
    assert answer.generated_text == live.completion(PROMPT, **chosen, **own)
    assert answer.generated_text != live.completion(PROMPT)


@shows("errors")
def test_adapters_of_unequal_ranks_are_not_merged(client: lorax.Client) -> None:
    merged = MergedAdapters(
        ids=["pirate", "shout"], weights=[1, 1], merge_strategy="linear", density=1
    )
    with pytest.raises(errors.ValidationError, match="rank"):
        client.generate(PROMPT, merged_adapters=merged, max_new_tokens=8)


@shows("errors")
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"adapter_id": "no-such-adapter"}, errors.GenerationError),
        ({"prompt": "word " * 9000}, errors.ValidationError),
        (
            {"response_format": {"type": "json_object", "schema": {"not": {}}}},
            errors.ValidationError,
        ),
    ],
)
def test_errors_have_the_clients_own_types(client: lorax.Client, arguments: Any, kind: Any) -> None:
    with pytest.raises(kind):
        client.generate(**{"prompt": PROMPT} | arguments)
    if "response_format" not in arguments:
        with pytest.raises(kind):
            list(client.generate_stream(**{"prompt": PROMPT} | arguments))


@shows("typed")
def test_a_schema(client: lorax.Client) -> None:
    form = {"type": "json_object", "schema": City.model_json_schema()}
    answer = client.generate(PROMPT, adapter_id="pirate", response_format=form, max_new_tokens=60)
    City.model_validate_json(answer.generated_text)
