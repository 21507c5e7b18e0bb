"""Activated LoRA against PEFT: an adapter that acts from its invocation tokens on."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loramux.engine.engine import Engine
from loramux.types.request import Request, Selection, TokenEvent, TokenLogprob
from tests.adapter_factory import make_peft_adapter
from tests.device_factory import ALL_LINEAR, device_engine
from tests.engine_factory import make_engine, make_prompt, make_request
from tests.memory_factory import InlineExecutor
from tests.model_factory import tiny_transformers_model

BLOCK = 16
NUM_OUTPUTS = 12
INVOCATION = (7, 9, 7)
OTHER_INVOCATION = (11,)
ADAPTERS: dict[str, dict[str, Any]] = {
    "alora": {"alora_invocation_tokens": list(INVOCATION), "r": 4},
    "other": {"alora_invocation_tokens": list(OTHER_INVOCATION), "r": 2, "lora_bias": False},
    "plain": {"r": 3},
}
Case = tuple[str, tuple[int, ...]]
"""The name of an adapter, or "" for the base, and a prompt."""


def words(count: int, seed: int) -> tuple[int, ...]:
    """Return tokens without those of the invocations."""
    return tuple(20 + token % 200 for token in make_prompt(count, seed))


def invoked(before: int, after: int, invocation: tuple[int, ...] = INVOCATION) -> tuple[int, ...]:
    return (*words(before, 1), *invocation, *words(after, 2))


CASES: dict[str, Case] = {
    "at the start": ("alora", invoked(0, 21)),
    "in the middle of a block": ("alora", invoked(21, 9)),
    "on a block boundary": ("alora", invoked(2 * BLOCK, 20)),
    "across a block boundary": ("alora", invoked(2 * BLOCK - 1, 20)),
    "at the end of the prompt": ("alora", invoked(37, 0)),
    "twice": ("alora", invoked(5, 0) + invoked(25, 4)),
    "twice and overlapping": ("alora", (*words(18, 3), 7, 9, 7, 9, 7, *words(4, 4))),
    "missing": ("alora", words(40, 5)),
    "a part of it at the end": ("alora", (*words(20, 6), 7, 9)),
    "another adapter": ("other", invoked(21, 9, OTHER_INVOCATION)),
    "the invocation of another": ("other", invoked(21, 9)),
    "a plain adapter": ("plain", invoked(21, 9)),
    "the base": ("", invoked(21, 9)),
}


class Oracle:
    """PEFT with all adapters loaded."""

    def __init__(self, model: Any, folders: dict[str, Path]) -> None:
        from peft import PeftModel

        (first, folder), *others = folders.items()
        self.peft: Any = PeftModel.from_pretrained(copy.deepcopy(model), folder, adapter_name=first)
        for name, other in others:
            self.peft.load_adapter(str(other), adapter_name=name)
        self.peft.eval().generation_config.eos_token_id = None

    def generate(self, cases: list[Case]) -> tuple[list[list[int]], list[Tensor]]:
        """Return the greedy tokens and their logits, in one batch padded on the left."""
        longest = max(len(prompt) for _, prompt in cases)
        padding = [longest - len(prompt) for _, prompt in cases]
        prompts = [
            [0] * size + list(prompt) for size, (_, prompt) in zip(padding, cases, strict=True)
        ]
        mask = [[0] * size + [1] * (longest - size) for size in padding]
        found = self.peft.generate(
            input_ids=torch.tensor(prompts),
            attention_mask=torch.tensor(mask),
            adapter_names=[name or "__base__" for name, _ in cases],
            max_new_tokens=NUM_OUTPUTS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = found.sequences[:, longest:].tolist()
        return tokens, list(torch.stack(found.logits, dim=1))

    def prompt_logits(self, case: Case) -> Tensor:
        name, prompt = case
        with torch.inference_mode():
            found = self.peft(input_ids=torch.tensor([prompt]), adapter_names=[name or "__base__"])
        logits: Tensor = found.logits[0]
        return logits


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    num_reused: int = 0


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_transformers_model("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def folders(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_peft_adapter(
            root / name, model, seed=number, target_modules=list(ALL_LINEAR), **settings
        )
        for number, (name, settings) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def oracle(model: Any, folders: dict[str, Path]) -> Oracle:
    return Oracle(model, folders)


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> dict[str, tuple[list[int], Tensor]]:
    tokens, logits = oracle.generate(list(CASES.values()))
    return dict(zip(CASES, zip(tokens, logits, strict=True), strict=True))


def select(engine: Engine, folder: Path | None) -> Selection:
    return () if folder is None else ((engine.register_adapter(folder).cid, 1.0),)


def request_of(
    engine: Engine, folders: dict[str, Path], name: str, case: Case, **params: Any
) -> Request:
    adapter, prompt = case
    params = {"max_tokens": NUM_OUTPUTS, "logprobs": 5, **params}
    return make_request(name, prompt, select(engine, folders.get(adapter)), **params)


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Answer]]:
    """Run all requests in one batch; return the answer of each choice."""
    answers = {r.request_id: [Answer() for _ in range(r.params.n)] for r in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            take(answers[event.request_id][event.index], event)
        engine.check_integrity()
    return answers


def take(answer: Answer, event: TokenEvent) -> None:
    if event.token_id is not None:
        answer.token_ids.append(event.token_id)
    if event.logprob is not None:
        answer.logprobs.append(event.logprob)
    answer.prompt_logprobs = event.prompt_logprobs or answer.prompt_logprobs
    answer.num_reused += event.num_reused


def check(answer: Answer, expected: tuple[list[int], Tensor], name: str) -> None:
    token_ids, logits = expected
    assert answer.token_ids == token_ids, name
    check_logprobs(answer.logprobs, logits)


def check_logprobs(found: list[TokenLogprob], logits: Tensor) -> None:
    assert len(found) == len(logits)
    for one, expected in zip(found, logits.float().log_softmax(-1), strict=True):
        token_ids, logprobs = zip((one.token_id, one.logprob), *one.top, strict=True)
        torch.testing.assert_close(
            torch.tensor(logprobs), expected[list(token_ids)], atol=1e-4, rtol=1e-4
        )


def check_all(engine: Engine, folders: dict[str, Path], expected: Any) -> None:
    requests = [request_of(engine, folders, name, case) for name, case in CASES.items()]
    for name, (answer,) in run(engine, requests).items():
        check(answer, expected[name], name)


def test_pefts_answers_depend_on_where_the_adapter_starts(
    oracle: Oracle, expected: dict[str, tuple[list[int], Tensor]]
) -> None:
    """Without this the other tests could pass with any start."""
    for name in ("in the middle of a block", "twice", "twice and overlapping"):
        _, prompt = CASES[name]
        logits = expected[name][1][0]
        for start in (0, prompt.index(7), None):
            offset = None if start is None else len(prompt) - start
            with torch.inference_mode():
                other = oracle.peft(
                    input_ids=torch.tensor([prompt]),
                    adapter_names=["alora"],
                    alora_offsets=[offset],
                ).logits[0, -1]
            is_right = name == "in the middle of a block" and start == 21
            assert ((other - logits).abs().max() < 1e-3) == is_right, (name, start)


@pytest.mark.parametrize("way", [("torch", 2048), ("torch", 24), ("cpu", 24), ("numba", 24)])
def test_a_mixed_batch_equals_peft(
    way: tuple[str, int],
    model: Any,
    folders: dict[str, Path],
    expected: dict[str, tuple[list[int], Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time, prompts come from the prefix cache."""
    kernels, budget = way
    if kernels == "numba":
        pytest.importorskip("numba")
        monkeypatch.delenv("LORAMUX_KERNELS", raising=False)
    else:
        monkeypatch.setenv("LORAMUX_KERNELS", kernels)
    engine = make_engine(model, tmp_path, max_batch_tokens=budget)
    check_all(engine, folders, expected)
    check_all(engine, folders, expected)


@pytest.mark.slow
def test_the_steps_of_a_gpu_equal_peft(
    model: Any,
    folders: dict[str, Path],
    expected: dict[str, tuple[list[int], Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="no Triton on this machine")
    engine, _ = device_engine(monkeypatch, model, tmp_path)
    names = ("in the middle of a block", "a plain adapter", "the base")
    requests = [request_of(engine, folders, name, CASES[name], max_tokens=2) for name in names]
    for name, (answer,) in run(engine, requests).items():
        tokens, logits = expected[name]
        check(answer, (tokens[:2], logits[:2]), name)


@pytest.mark.parametrize("name", CASES)
def test_a_single_request_equals_peft(
    name: str,
    model: Any,
    folders: dict[str, Path],
    expected: dict[str, tuple[list[int], Tensor]],
    tmp_path: Path,
) -> None:
    """Over an empty cache, over one that only the base filled, and over its own."""
    engine = make_engine(model, tmp_path)
    adapter, prompt = CASES[name]
    start = engine_start(adapter, prompt)
    base = request_of(engine, folders, "base", ("", prompt))
    run(engine, [base])
    for num_reused in (start // BLOCK * BLOCK, (len(prompt) - 1) // BLOCK * BLOCK):
        request = request_of(engine, folders, name, CASES[name])
        (answer,) = run(engine, [request])[name]
        check(answer, expected[name], name)
        assert answer.num_reused == num_reused
    again = run(engine, [request_of(engine, folders, "base", ("", prompt))])["base"]
    assert again[0].num_reused == (len(prompt) - 1) // BLOCK * BLOCK


def engine_start(adapter: str, prompt: tuple[int, ...]) -> int:
    """Return the number of tokens that are the base's, by an independent search."""
    invocation = ADAPTERS.get(adapter, {}).get("alora_invocation_tokens")
    if invocation is None:
        return 0 if adapter else len(prompt) - 1
    size = len(invocation)
    starts = [i for i in range(len(prompt)) if list(prompt[i : i + size]) == invocation]
    return max(starts, default=len(prompt) - 1)


def test_choices_and_prompt_logprobs_equal_peft(
    model: Any,
    folders: dict[str, Path],
    oracle: Oracle,
    expected: dict[str, tuple[list[int], Tensor]],
    tmp_path: Path,
) -> None:
    engine = make_engine(model, tmp_path, max_batch_tokens=10)
    names = ("in the middle of a block", "twice and overlapping", "missing")
    requests = [
        request_of(engine, folders, name, CASES[name], n=2, prompt_logprobs=3) for name in names
    ]
    for name, answers in run(engine, requests).items():
        prompt_logits = oracle.prompt_logits(CASES[name])
        for answer in answers:
            check(answer, expected[name], name)
            assert answer.prompt_logprobs is not None
            check_logprobs(answer.prompt_logprobs, prompt_logits[:-1])


def test_preempted_requests_equal_peft(
    model: Any,
    folders: dict[str, Path],
    expected: dict[str, tuple[list[int], Tensor]],
    tmp_path: Path,
) -> None:
    """In a pool that holds the adapters and a few sequences."""
    engine = make_engine(model, tmp_path, max_batch_tokens=20, max_sequences=6)
    pages = sum(
        engine.residency.num_pages(cid)
        for folder in folders.values()
        for cid, _ in select(engine, folder)
    )
    page_bytes = 2 * 2 * BLOCK * 2 * 16 * 4
    engine = make_engine(
        model,
        tmp_path,
        max_batch_tokens=20,
        max_sequences=6,
        # Loads that take time would leave fewer sequences to compete for pages.
        loads=InlineExecutor(),
        device_memory_bytes=(pages + 7) * page_bytes,
    )
    names = list(CASES)
    requests = [
        request_of(engine, folders, f"{name} {number}", CASES[name])
        for number in range(2)
        for name in names
    ]
    answers = run(engine, requests)
    for name, (answer,) in answers.items():
        check(answer, expected[name[:-2]], name)
    assert engine.scheduler.num_preemptions > 0
