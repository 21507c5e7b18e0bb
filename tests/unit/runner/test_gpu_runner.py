"""The GPU's runner against the reference, over the same weights and pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from loramux.errors import DoesNotFit
from loramux.runner.gpu_runner import BatchLimits
from loramux.types.step import UNKNOWN_TOKEN, StepPlan
from tests.chunk_factory import make_chunk
from tests.device_factory import (
    decode,
    device_engine,
    last_launch,
    lease,
    mixed_selections,
    reference_engine,
    row,
    runner_with,
    two_adapters,
)
from tests.engine_factory import make_prompt, make_request, run_all
from tests.model_factory import tiny_transformers_model

pytest.importorskip("triton", reason="no Triton on this machine")

SETTINGS: dict[str, Any] = {"max_batch_tokens": 24, "max_sequences": 6}


def test_mixed_requests_get_the_tokens_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama")
    folders = two_adapters(model, tmp_path)
    answers = []
    for engine in (
        reference_engine(model, tmp_path / "model", **SETTINGS),
        device_engine(monkeypatch, model, tmp_path / "model", **SETTINGS)[0],
    ):
        requests = [
            make_request(f"r{i}", make_prompt(3 + 6 * i, seed=i), selection, max_tokens=3)
            for i, selection in enumerate(mixed_selections(engine, folders))
        ]
        answers.append(run_all(engine, requests))
    assert answers[0] == answers[1]


def test_a_step_is_launched_before_the_last_tokens_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine = device_engine(monkeypatch, model, tmp_path, **SETTINGS)[0]
    engine.add(make_request("a", make_prompt(5, seed=1), max_tokens=3))
    counts = []
    while engine.has_work:
        counts.append(len(engine.step()))
        engine.check_integrity()
    # One step late, and no row for a fourth token.
    assert counts == [0, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [14, pytest.param(200, marks=pytest.mark.slow)])
def test_running_ahead_does_not_change_the_tokens(
    num_pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends by a stop token, preemptions, and samplers that must see every token before."""
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    page_bytes = 1 * 2 * 16 * 2 * 16 * 4
    settings = {**SETTINGS, "device_memory_bytes": num_pages * page_bytes}
    reference = reference_engine(model, tmp_path, **settings)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 4},
        {"frequency_penalty": 1.5, "max_tokens": 30},
        {"temperature": 0.9, "top_k": 7, "seed": 5},
    ]
    requests = [
        make_request(f"r{i}", make_prompt(7 + 5 * i, seed=i), **{"max_tokens": 45, **kind})
        for i, kind in enumerate(kinds * 2)
    ]
    free = run_all(reference, requests)
    stops = [(*tokens[11:12], *tokens[25:26]) for tokens in free.values()]
    stopped = [
        msgspec.structs.replace(
            request, params=msgspec.structs.replace(request.params, stop_token_ids=stop)
        )
        for request, stop in zip(requests, stops, strict=True)
    ]
    expected = run_all(reference, stopped)
    assert any(len(expected[name]) < len(free[name]) for name in free)
    engine = device_engine(monkeypatch, model, tmp_path, **settings)[0]
    assert run_all(engine, stopped) == expected
    assert (engine.scheduler.num_preemptions > 0) is (num_pages == 14)


def test_constrained_rows_beside_free_ones_get_the_tokens_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    allowed = tuple(range(40, 72, 3))
    kinds: list[dict[str, Any]] = [
        {"allowed_token_ids": allowed},
        {},
        {"allowed_token_ids": allowed, "temperature": 1.0, "seed": 4},
        {"temperature": 1.0, "seed": 4},
        {"logit_bias": {9: 100.0}, "stop_token_ids": (9,), "min_tokens": 4},
    ]
    requests = [
        make_request(f"r{i}", make_prompt(5, seed=i), **{"max_tokens": 7, **kind})
        for i, kind in enumerate(kinds)
    ]
    expected = run_all(reference_engine(model, tmp_path, **SETTINGS), requests)
    assert {*expected["r0"], *expected["r2"]} <= set(allowed)
    assert len(expected["r4"]) == 5 and expected["r4"][-1] == 9
    engine = device_engine(monkeypatch, model, tmp_path, **SETTINGS)[0]
    assert run_all(engine, requests) == expected


def test_constrained_rows_run_ahead_with_the_mask_of_the_token_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine = device_engine(monkeypatch, model, tmp_path, **SETTINGS)[0]
    # A token may not follow itself: each mask depends on the token of the step in flight.
    one, other = 40, 43
    engine.add(
        make_request(
            "a",
            make_prompt(5, seed=1),
            allowed_token_ids=(one, other),
            bad_words_token_ids=((one, one), (other, other)),
            max_tokens=4,
        )
    )
    engine.add(make_request("free", make_prompt(5, seed=2), max_tokens=4))
    counts, tokens = [], []
    while engine.has_work:
        events = engine.step()
        counts.append(len(events))
        tokens += [event.token_id for event in events if event.request_id == "a"]
        engine.check_integrity()
    # One step late, as steps without masks.
    assert counts == [0, 2, 2, 2, 2]
    assert tokens in ([one, other] * 2, [other, one] * 2)


def test_logits_of_chunks_and_decodes_equal_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama")
    folders = two_adapters(model, tmp_path)
    tokens = make_prompt(20, seed=4)
    found = []
    for engine in (
        reference_engine(model, tmp_path / "model"),
        device_engine(monkeypatch, model, tmp_path / "model", max_sequences=4)[0],
    ):
        selections = mixed_selections(engine, folders)[:4]
        lease(engine, *selections)
        # Pages from the end of the pool: the adapters have those at its start.
        last = engine.pages.num_pages - 1
        parts = []
        for cut in (slice(0, 17), slice(17, 20)):
            chunks = [
                make_chunk(i, tokens[cut], cut.start, [last - 2 * i, last - 2 * i - 1], s)
                for i, s in enumerate(selections)
            ]
            logits = engine.executor.logits(StepPlan(tuple(chunks)))
            parts += [logits[i] for i in range(len(chunks))]
        found.append(torch.cat(parts))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


def test_logprobs_do_not_depend_on_the_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    prompt = make_prompt(6, seed=3)
    rows = [row(), row(temperature=0.8), row(top_k=5, temperature=1.0), row(logprobs=2)]
    rows.append(row(temperature=1.0, repetition_penalty=1.3, logit_bias={4: 5.0}))
    chunks = [
        make_chunk(
            10 + i,
            prompt,
            0,
            [i],
            (),
            sample=sample,
            following=prompt[1:] if i == 3 else (),
            top=1,
        )
        for i, sample in enumerate(rows)
    ]
    chunks.append(make_chunk(20, prompt, 0, [9], ()))
    expected = reference_engine(model, tmp_path).executor.run(StepPlan(tuple(chunks)))
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=4)[1]
    result = runner.run(StepPlan(tuple(chunks)))
    assert result.accepted == expected.accepted
    assert len(result.logprobs[13]) == len(prompt)
    for found, known in zip(result.logprobs[13], expected.logprobs[13], strict=True):
        assert (found.token_id, found.rank) == (known.token_id, known.rank)
        assert found.logprob == pytest.approx(known.logprob, abs=1e-4)
    assert list(result.logprobs) == [13]


class ScarceMemory:
    """Attention for which a step of more than some rows does not fit."""

    def __init__(self, attention: Any, max_rows: int) -> None:
        self._attention = attention
        self._max_rows = max_rows

    def plan(self, sequences: Any, *others: Any) -> Any:
        if sum(sequence.num_rows for sequence in sequences) > self._max_rows:
            raise torch.OutOfMemoryError("no room")
        return self._attention.plan(sequences, *others)


def test_a_step_without_memory_is_split_until_a_single_token_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=2)[1]
    prompt = make_prompt(9, seed=2)
    chunk = make_chunk(3, prompt, 0, [0], (), sample=row(), following=prompt[1:])
    plan = StepPlan((chunk, msgspec.structs.replace(chunk, sequence_id=4, page_ids=[1])))
    expected = runner.run(plan)
    kernels = runner._kernels
    runner._kernels = replace(kernels, attention=ScarceMemory(kernels.attention, max_rows=5))
    result = runner.run(plan)
    assert result.accepted == expected.accepted
    assert len(result.logprobs[3]) == 8
    assert runner._max_tokens <= 5
    # Both halves need a token of the step before, which the first half's would replace.
    first = StepPlan(tuple(msgspec.structs.replace(c, rows=c.rows[1:]) for c in plan.chunks))
    tokens = runner.launch(first).result().accepted
    later = [decode(c.sequence_id, UNKNOWN_TOKEN, 9, [*c.page_ids], ()) for c in plan.chunks]
    known = [decode(c.sequence_id, tokens[c.sequence_id][0], 9, [*c.page_ids], ()) for c in later]
    expected = runner.run(StepPlan(tuple(known)))
    runner.launch(first)
    runner._max_tokens = 1
    monkeypatch.setattr(runner, "_launch_graph", lambda *_: None)
    assert runner.run(StepPlan(tuple(later))).accepted == expected.accepted
    runner._kernels = replace(kernels, attention=ScarceMemory(kernels.attention, max_rows=0))
    with pytest.raises(DoesNotFit, match="bytes are free"):
        runner.run(plan)


def test_other_errors_are_not_treated_as_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=2)[1]

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    runner._kernels = replace(runner._kernels, attention=SimpleNamespace(plan=broken))
    chunk = make_chunk(0, (1, 2), 0, [0], (), following=(2,))
    with pytest.raises(RuntimeError, match="broken"):
        runner.run(StepPlan((chunk,)))
    monkeypatch.setattr(runner.decode_graphs, "launch", broken)
    with pytest.raises(RuntimeError, match="broken"):
        runner.run(StepPlan((decode(0, 1, 0, [0], ()),)))


def test_a_step_with_more_lora_work_than_a_graph_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    folders = two_adapters(model, tmp_path)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", max_sequences=4)
    selections = mixed_selections(engine, folders)[:4]
    lease(engine, *selections)
    last = engine.pages.num_pages - 1
    chunks = tuple(decode(i, 5 + i, 0, [last - i], s) for i, s in enumerate(selections))
    expected = runner.run(StepPlan(chunks))
    for work in (runner.decode_graphs.lora.segmented, runner._prefill_lora):
        limits = replace(work.tables.limits, max_items=1)
        work.tables = replace(work.tables, limits=limits)
    assert runner.run(StepPlan(chunks)).accepted == expected.accepted


def test_all_kernels_in_the_interpreter_equal_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loramux.kernels.gpu import elementwise as fused_triton
    from loramux.kernels.gpu import sampling as sampling_triton
    from loramux.kernels.gpu.lora import segmented as lora_triton

    model = tiny_transformers_model("llama", num_hidden_layers=1, vocab_size=64)
    folders = two_adapters(model, tmp_path)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", max_sequences=2)
    few = mixed_selections(engine, folders)[1]
    lease(engine, few)
    limits = BatchLimits(max_batch_tokens=8, max_sequences=2, max_pages=2)
    ops: dict[str, Any] = {"elementwise": fused_triton, "lora": lora_triton}
    fast = runner_with(runner, limits, **ops, sampling=sampling_triton)
    last = engine.pages.num_pages - 1
    prompt = StepPlan((make_chunk(0, (5, 6), 0, [last], few, sample=row(temperature=1.0)),))
    step = StepPlan((decode(0, 7, 2, [last], few), decode(1, 8, 0, [last - 1], ())))
    # Padding rows hold uninitialised memory of any magnitude.
    with np.errstate(over="ignore", invalid="ignore"):
        assert fast.run(prompt).accepted == runner.run(prompt).accepted
        assert fast.run(step).accepted == runner.run(step).accepted
    found, expected = (last_launch(one)[2] for one in (fast, runner))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_step_whose_sampler_has_no_memory_runs_without_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=2)[1]
    plan = StepPlan((decode(0, 7, 0, [0], ()), decode(1, 8, 0, [1], ())))
    expected = runner.run(plan)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(runner.decode_graphs, "launch", fail)
    assert runner.run(plan).accepted == expected.accepted


def test_a_step_without_memory_fails_its_requests_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine, runner = device_engine(monkeypatch, model, tmp_path, **SETTINGS)
    engine.add(make_request("lost", make_prompt(5, seed=1), max_tokens=9))
    assert engine.step() == []
    kernels = runner._kernels
    runner._kernels = replace(kernels, attention=ScarceMemory(kernels.attention, max_rows=0))
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_launch_graph", lambda *_: None)
        first, last = engine.step()
    assert first.token_id is not None and last.error_code == "memory"
    assert last.error is not None and "bytes are free" in last.error
    runner._kernels = kernels
    engine.check_integrity()
    assert len(run_all(engine, [make_request("kept", make_prompt(5, seed=1))])["kept"]) == 8
