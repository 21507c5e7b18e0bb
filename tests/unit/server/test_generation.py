"""The engine requests of a generation as one stream: order, completeness, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from loramux.backend.text import Delta
from loramux.errors import (
    AdapterRefused,
    DoesNotFit,
    EngineStopped,
    LoramuxError,
    RequestTimeout,
)
from loramux.metrics.server import Metrics
from loramux.receipts.issuer import ReceiptIssuer
from loramux.server.context import Context, ServerOptions
from loramux.server.generate.generation import (
    Deltas,
    Generation,
    GenerationRequest,
    RouteKind,
    collect,
)
from loramux.server.generate.generation import run as run_generation
from loramux.server.generate.receipt_draft import ReceiptDraft
from loramux.server.generate.sampling import MaxTokens
from loramux.server.naming.names import AdapterNames, Selected
from loramux.types.caller import ANONYMOUS
from loramux.types.request import FinishReason, Request
from loramux.types.sampling import SamplingParams
from tests.unit.server.asgi_client import run
from tests.unit.server.scripted_backend import CARD, ByteCodec, ScriptedBackend, delta, named

KIND = RouteKind(
    id_prefix="x",
    prompt_param="prompt",
    default_max_tokens=16,
)


def make_requests(*prompts: bytes, n: int = 1) -> tuple[Request, ...]:
    params = SamplingParams(n=n)
    return tuple(
        Request(request_id=f"r-{i}", prompt_token_ids=tuple(prompt), params=params)
        for i, prompt in enumerate(prompts)
    )


def make_generation(engine_requests: Sequence[Request]) -> Generation:
    request = GenerationRequest(
        id="x",
        kind=KIND,
        caller=ANONYMOUS,
        selected=Selected("m"),
        codec=ByteCodec(),
        vocab_size=CARD.vocab_size,
        params=engine_requests[0].params,
        max_tokens=MaxTokens(None),
    )
    draft = ReceiptDraft(ReceiptIssuer(), lambda: ("m", CARD.digest))
    draft.selected = request.selected
    return Generation(
        request=request,
        engine_requests=tuple(engine_requests),
        draft=draft,
        fingerprint="fp",
    )


def start(
    backend: ScriptedBackend,
    generation: Generation,
    *,
    metrics: Metrics | None = None,
    names: AdapterNames | None = None,
) -> Deltas:
    context = Context(
        backend=backend,
        options=ServerOptions(),
        metrics=metrics or Metrics(backend),
        names=names or backend.names,
    )
    return run_generation(context, generation)


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "tiny-base", **labels})


def test_choices_of_many_requests_keep_their_order() -> None:
    async def own_prompt(job: Request) -> AsyncIterator[Delta]:
        prompt = bytes(job.prompt_token_ids)
        for turn in range(3):
            for index in reversed(range(job.params.n)):
                finish = FinishReason.LENGTH if turn == 2 else None
                yield delta(job, index, prompt + str(index).encode(), finish)
                for _ in range(len(prompt)):
                    await asyncio.sleep(0)

    backend = ScriptedBackend(own_prompt)
    jobs = make_requests(b"aaa", b"b", b"cc", n=2)
    generation = make_generation(jobs)
    choices, usage = run(collect(generation, start(backend, generation)))
    texts = [choice.text for choice in choices]
    assert texts == [f"{p}{i}" * 3 for p in ("aaa", "b", "cc") for i in range(2)]
    assert (usage.prompt_tokens, usage.total_tokens) == (6, 6 + 2 * 3 * (4 + 2 + 3))


def test_metrics_count_how_requests_ended() -> None:
    backend = ScriptedBackend()
    metrics = Metrics(backend)

    async def work() -> None:
        generation = make_generation(make_requests(b"abc", b"d"))
        await collect(generation, start(backend, generation, metrics=metrics))
        async with aclosing(
            start(backend, make_generation(make_requests(b"e")), metrics=metrics)
        ) as deltas:
            await anext(deltas)
        backend.script = broken
        with pytest.raises(EngineStopped):
            await collect(
                generation,
                start(backend, make_generation(generation.engine_requests[:1]), metrics=metrics),
            )

    async def broken(job: Request) -> AsyncIterator[Delta]:
        yield delta(job, 0, b"a")
        raise EngineStopped("gone")

    run(work())
    ended = {
        reason: sample(metrics, "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "abort", "error")
    }
    assert ended == {"stop": 2, "abort": 1, "error": 1}
    assert sample(metrics, "vllm:prompt_tokens_total") == 3 + 1 + 1 + 3
    assert sample(metrics, "vllm:generation_tokens_total") == 9 + 9 + 3 + 1
    assert sample(metrics, "vllm:time_to_first_token_seconds_count") == 4
    assert sample(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert sample(metrics, "vllm:e2e_request_latency_seconds_count") == 4


def test_a_missing_choice_is_an_error() -> None:
    async def forgets_the_second(job: Request) -> AsyncIterator[Delta]:
        yield delta(job, 0, b"a", FinishReason.STOP)

    backend = ScriptedBackend(forgets_the_second)
    generation = make_generation(make_requests(b"a", n=2))
    with pytest.raises(EngineStopped, match="broke off"):
        run(collect(generation, start(backend, generation)))


@pytest.mark.parametrize(
    ("code", "kind"),
    [("timeout", RequestTimeout), ("adapter", AdapterRefused), ("memory", DoesNotFit)],
)
def test_an_error_of_the_engine_is_raised_by_its_code(code: str, kind: type[LoramuxError]) -> None:
    async def fails(job: Request) -> AsyncIterator[Delta]:
        end = delta(job, 0, b"", FinishReason.ERROR)
        yield replace(end, error="Said why.", error_code=code)

    backend = ScriptedBackend(fails)
    generation = make_generation(make_requests(b"a"))
    metrics = Metrics(backend)
    with pytest.raises(kind, match="Said why."):
        run(collect(generation, start(backend, generation, metrics=metrics)))
    assert sample(metrics, "vllm:request_success_total", finished_reason="error") == 1


def test_a_backend_may_return_a_plain_iterator() -> None:
    """The contract promises an AsyncIterator; only generators have aclose()."""

    class Plain:
        def __init__(self, job: Request) -> None:
            self._left = [delta(job, 0, b"a", FinishReason.STOP)]

        def __aiter__(self) -> Plain:
            return self

        async def __anext__(self) -> Delta:
            if not self._left:
                raise StopAsyncIteration
            return self._left.pop()

    class PlainBackend(ScriptedBackend):
        def submit(self, job: Request) -> Any:
            return Plain(job)

    backend = PlainBackend()
    generation = make_generation(make_requests(b"a"))
    [choice], _ = run(collect(generation, start(backend, generation)))
    assert choice.text == "a"


class RestoringNames(AdapterNames):
    def __init__(self, backend: ScriptedBackend, *, is_restored: bool) -> None:
        super().__init__(backend)
        self.asked: list[str] = []
        self._is_restored = is_restored

    async def restore(self, cid: str) -> bool:
        self.asked.append(cid)
        return self._is_restored


def make_adapter_generation() -> Generation:
    selection = ((named("legal").cid, 1.0), (named("team/polite").cid, 0.5))
    return make_generation(
        [structs.replace(job, selection=selection) for job in make_requests(b"a")]
    )


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_request_runs_again_once_its_adapters_files_are_restored(is_restored: bool) -> None:
    tries: list[Request] = []

    async def missing_at_first(job: Request) -> AsyncIterator[Delta]:
        tries.append(job)
        if len(tries) == 1:
            raise AdapterRefused("adapter_unavailable", "its folder is gone")
        yield delta(job, 0, b"here", FinishReason.STOP)

    backend = ScriptedBackend(missing_at_first)
    names = RestoringNames(backend, is_restored=is_restored)
    generation = make_adapter_generation()
    deltas = start(backend, generation, names=names)
    if is_restored:
        [choice], _ = run(collect(generation, deltas))
        assert choice.text == "here"
    else:
        with pytest.raises(AdapterRefused, match="folder is gone"):
            run(collect(generation, deltas))
    assert names.asked == [named("legal").cid, named("team/polite").cid]
    assert len(tries) == 1 + is_restored


def test_an_answer_that_has_begun_is_not_started_again() -> None:
    async def fails_later(job: Request) -> AsyncIterator[Delta]:
        yield delta(job, 0, b"a")
        raise AdapterRefused("adapter_unavailable", "lost")

    backend = ScriptedBackend(fails_later)
    names = RestoringNames(backend, is_restored=True)
    generation = make_adapter_generation()
    with pytest.raises(AdapterRefused, match="lost"):
        run(collect(generation, start(backend, generation, names=names)))
    assert names.asked == []
