"""Sums of adapters against PEFT: 200 random requests of one to four adapters in one batch."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loramux.engine.engine import Engine
from loramux.types.composition import compose
from loramux.types.request import Selection
from tests.adapter_factory import ATTENTION, make_peft_adapter
from tests.device_factory import ALL_LINEAR, device_engine
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.model_factory import tiny_transformers_model

ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 4},
    {"r": 4, "target_modules": list(ALL_LINEAR)},
    {"r": 4, "target_modules": list(ALL_LINEAR), "lora_alpha": 3},
    {"r": 1, "target_modules": ["down_proj", "o_proj"]},
    {"r": 20, "target_modules": list(ATTENTION), "lora_alpha": 4},
    {"r": 3, "use_rslora": True, "target_modules": ["gate_proj", "up_proj", "k_proj"]},
)
WEIGHTS = (1.0, 1.0, 0.5, 0.3, -0.25, -1.0, 0.0)
Terms = tuple[tuple[int, float], ...]
"""Numbers of adapters, and their weights."""
Case = tuple[tuple[int, ...], Terms, Tensor]
"""A prompt, its adapters, and its logits."""


class Oracle:
    """The base with PEFT's deltas of the adapters added to its weights."""

    def __init__(self, model: Any, folders: list[Path]) -> None:
        from peft import PeftModel

        self.peft = PeftModel.from_pretrained(copy.deepcopy(model), folders[0], adapter_name="0")
        for number, folder in enumerate(folders[1:], start=1):
            self.peft.load_adapter(str(folder), adapter_name=str(number))
        self._model = copy.deepcopy(model).eval()
        self._deltas: list[dict[str, Tensor]] = [{} for _ in folders]
        for path, module in self.peft.named_modules():
            for name in getattr(module, "lora_A", {}):
                delta = module.get_delta_weight(name).detach()
                self._deltas[int(name)][path.removeprefix("base_model.model.")] = delta

    def logits(self, tokens: tuple[int, ...], terms: Terms) -> Tensor:
        changed: dict[str, Tensor] = {}
        for number, weight in terms:
            for path, delta in self._deltas[number].items():
                linear = self._model.get_submodule(path)
                changed.setdefault(path, linear.weight.data.clone())
                linear.weight.data += weight * delta
        with torch.inference_mode():
            logits: Tensor = self._model(torch.tensor([tokens])).logits[0]
        for path, weight_before in changed.items():
            self._model.get_submodule(path).weight.data = weight_before
        return logits


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_transformers_model("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def folders(model: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        make_peft_adapter(root / str(number), model, seed=number, **settings)
        for number, settings in enumerate(ADAPTERS)
    ]


@pytest.fixture(scope="module")
def oracle(model: Any, folders: list[Path]) -> Oracle:
    return Oracle(model, folders)


def random_requests(count: int) -> list[tuple[tuple[int, ...], Terms]]:
    """Prompts with one to four adapters each; every tenth is of the base."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        numbers = draw.sample(range(len(ADAPTERS)), draw.choice((1, 2, 3, 4)))
        terms = tuple((number, draw.choice(WEIGHTS)) for number in numbers)
        prompt = make_prompt(draw.choice((1, 2, 5)), seed=number)
        found.append((prompt, () if number % 10 == 0 else terms))
    return found


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[Case]:
    """Request with the logits of PEFT."""
    return [(prompt, terms, oracle.logits(prompt, terms)) for prompt, terms in random_requests(200)]


def selection_of(engine: Engine, folders: list[Path], terms: Terms) -> Selection:
    cids = [engine.register_adapter(folder).cid for folder in folders]
    return compose((cids[number], weight) for number, weight in terms)


def check_all(engine: Engine, folders: list[Path], expected: list[Case]) -> None:
    cids = [engine.register_adapter(folder).cid for folder in folders]
    batch = [(prompt, compose((cids[n], w) for n, w in terms)) for prompt, terms, _ in expected]
    for (_, _, logits), found in zip(expected, engine.prompt_logits(batch), strict=True):
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
    engine.check_integrity()


@pytest.mark.parametrize("kernels", ["torch", "cpu", "numba"])
def test_two_hundred_sums_in_one_batch_equal_peft(
    kernels: str,
    model: Any,
    folders: list[Path],
    expected: list[Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels == "numba":
        pytest.importorskip("numba")
        monkeypatch.delenv("LORAMUX_KERNELS", raising=False)
    else:
        monkeypatch.setenv("LORAMUX_KERNELS", kernels)
    engine = make_engine(model, tmp_path, device_memory_bytes=16 * 2**20)
    check_all(engine, folders, expected)


def test_the_work_lists_of_a_gpu_give_the_sums_of_peft(
    model: Any,
    folders: list[Path],
    expected: list[Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="no Triton on this machine")
    engine, _ = device_engine(monkeypatch, model, tmp_path)
    check_all(engine, folders, expected[:16])


def test_the_oracle_is_pefts_cat(oracle: Oracle) -> None:
    terms = ((0, 0.7), (1, 0.3), (4, -0.4))
    names, weights = zip(*((str(number), weight) for number, weight in terms), strict=True)
    oracle.peft.add_weighted_adapter(list(names), list(weights), "sum", combination_type="cat")
    oracle.peft.set_adapter("sum")
    tokens = make_prompt(6, seed=3)
    with torch.inference_mode():
        expected = oracle.peft.eval()(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(oracle.logits(tokens, terms), expected, atol=1e-4, rtol=1e-4)


def test_permuted_sums_share_the_prefix_cache_and_other_weights_do_not(
    model: Any, folders: list[Path], tmp_path: Path
) -> None:
    engine = make_engine(model, tmp_path, reference_kernels=True)
    prompt = make_prompt(40, seed=1)
    cases: list[tuple[Terms, int]] = [
        (((0, 1.0), (1, 0.5)), 0),
        (((1, 0.5), (0, 1.0)), 32),
        (((1, 0.5), (0, 1.0), (2, 0.0)), 32),
        (((0, 1.0), (1, 0.6)), 0),
        (((0, 1.0),), 0),
        (((0, 0.0),), 0),
        ((), 32),
    ]
    answers = []
    for number, (terms, num_reused) in enumerate(cases):
        selection = selection_of(engine, folders, terms)
        before = engine.memory.prefixes.num_hit_tokens if engine.memory.prefixes else 0
        answers.append(run_all(engine, [make_request("r", prompt, selection, max_tokens=3)])["r"])
        assert engine.memory.prefixes is not None
        assert engine.memory.prefixes.num_hit_tokens - before == num_reused, number
    assert answers[0] == answers[1] == answers[2] and answers[5] == answers[6]
