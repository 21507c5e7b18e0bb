from __future__ import annotations

import asyncio

import pytest

from loramux.engine.outputs import OutputCollector, RequestStream
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import EngineStopped
from loramux.types.request import FinishReason, Request, TokenEvent
from loramux.types.sampling import SamplingParams
from tests.tokenizer_factory import save_byte_level


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_byte_level(tmp_path_factory.mktemp("tokenizer")))


def make_stream(tokenizer: Tokenizer, **params: object) -> RequestStream:
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request(request_id="a", prompt_token_ids=(1,), params=settings)
    return RequestStream(OutputCollector(request, tokenizer))


def put_text(stream: RequestStream, tokenizer: Tokenizer, text: str, index: int = 0) -> None:
    for token_id in tokenizer.encode(text):
        stream.put(TokenEvent(request_id="a", index=index, token_id=token_id))


def end(stream: RequestStream, index: int = 0) -> None:
    reason = FinishReason.LENGTH
    stream.put(TokenEvent(request_id="a", index=index, token_id=None, finish_reason=reason))


def test_a_slow_reader_gets_one_merged_delta_per_choice(tokenizer: Tokenizer) -> None:
    async def read() -> None:
        stream = make_stream(tokenizer, n=2)
        put_text(stream, tokenizer, "The quick brown fox")
        put_text(stream, tokenizer, "lazy dog", index=1)
        put_text(stream, tokenizer, " jumps")
        end(stream)
        first, second = sorted(await stream.take(), key=lambda delta: delta.index)
        assert first.text == "The quick brown fox jumps"
        assert first.finish_reason is FinishReason.LENGTH and second.finish_reason is None
        assert tokenizer.decode(first.token_ids) == first.text
        assert not stream.is_finished
        end(stream, index=1)
        await stream.take()
        assert stream.is_finished

    asyncio.run(read())


def test_deltas_before_an_error_are_delivered_first(tokenizer: Tokenizer) -> None:
    async def read() -> None:
        stream = make_stream(tokenizer)
        put_text(stream, tokenizer, "The quick")
        stream.fail(EngineStopped("dead"))
        (delta,) = await stream.take()
        assert delta.text == "The quick" and delta.finish_reason is None
        with pytest.raises(EngineStopped):
            await stream.take()

    asyncio.run(read())


def test_a_reader_waits_for_the_next_delta(tokenizer: Tokenizer) -> None:
    async def read() -> None:
        stream = make_stream(tokenizer)
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        assert not reader.done()
        put_text(stream, tokenizer, "The")
        assert [delta.text for delta in await reader] == ["The"]

    asyncio.run(read())


def test_logprobs_are_merged(tokenizer: Tokenizer) -> None:
    async def read() -> None:
        stream = make_stream(tokenizer, logprobs=0)
        put_text(stream, tokenizer, "The quick")
        (delta,) = await stream.take()
        assert delta.logprobs == ()

    asyncio.run(read())


def test_an_end_that_arrives_while_the_reader_is_busy_is_not_lost(tokenizer: Tokenizer) -> None:
    async def read() -> None:
        stream = make_stream(tokenizer)
        put_text(stream, tokenizer, "The")
        await stream.take()
        end(stream)
        assert not stream.is_finished, "the last delta was not taken yet"
        (last,) = await stream.take()
        assert last.finish_reason is FinishReason.LENGTH and stream.is_finished

    asyncio.run(read())


def test_merging_keeps_reused_tokens_and_the_error_code(tokenizer: Tokenizer) -> None:
    async def read() -> None:
        stream = make_stream(tokenizer)
        (first, *_) = tokenizer.encode("The quick")
        stream.put(TokenEvent(request_id="a", index=0, token_id=first, num_reused=7))
        put_text(stream, tokenizer, " quick")
        stream.put(
            TokenEvent(
                request_id="a",
                index=0,
                token_id=None,
                finish_reason=FinishReason.ERROR,
                error="Too late.",
                error_code="timeout",
            )
        )
        (delta,) = await stream.take()
        assert (delta.num_reused, delta.error, delta.error_code) == (7, "Too late.", "timeout")

    asyncio.run(read())
