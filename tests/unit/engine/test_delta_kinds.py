"""Adapters of every kind in one batch with base rows, against PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.engine.engine import Engine
from loramux.errors import AdapterRefused, InvalidRequest
from loramux.types.composition import compose
from loramux.types.request import Selection
from tests.device_factory import device_engine
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.kinds_factory import (
    KINDS,
    REFUSED,
    greedy,
    kinds_of,
    load_kind,
    logits_of,
    make_kind,
)
from tests.model_factory import tiny_transformers_model

# Biases, tied embeddings, norms of weight + 1 with sandwich norms and scaled embeddings.
FAMILIES = {"llama": {}, "llama31": {}, "smollm2": {"hidden_size": 48}, "gemma2": {}}
NUM_TOKENS = 6
Cases = dict[str, tuple[tuple[int, ...], Any]]


class Scene:
    """A tiny model with one adapter of each kind, and PEFT's models of them."""

    def __init__(self, family: str, folder: Path, kinds: list[str]) -> None:
        self.model = tiny_transformers_model(family, num_hidden_layers=2, **FAMILIES[family])
        self.folders = {
            name: make_kind(name, self.model, folder / name, seed=number)
            for number, name in enumerate(kinds)
        }
        self.oracles = {
            name: load_kind(name, self.model, path) for name, path in self.folders.items()
        }
        self.prompts = {
            name: make_prompt(5 + number % 4, seed=number, vocab_size=self.vocab_size(name))
            for number, name in enumerate(["", *kinds])
        }

    def vocab_size(self, name: str) -> int:
        size: int = self.model.config.vocab_size
        return size + (KINDS[name].num_added_tokens if name else 0)

    def oracle(self, name: str) -> Any:
        return self.oracles[name] if name else self.model


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "smollm2")]


@pytest.fixture(scope="module", params=["llama31", "gemma2", *SLOW])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    family: str = request.param
    return Scene(family, tmp_path_factory.mktemp("kinds"), kinds_of(family))


def selections_of(engine: Engine, scene: Scene) -> dict[str, Selection]:
    found: dict[str, Selection] = {"": ()}
    for name, folder in scene.folders.items():
        found[name] = ((engine.register_adapter(folder).cid, 1.0),)
    return found


def check_logits(engine: Engine, scene: Scene) -> None:
    selections = selections_of(engine, scene)
    batch = [(scene.prompts[name], selection) for name, selection in selections.items()]
    for name, logits in zip(selections, engine.prompt_logits(batch), strict=True):
        expected = logits_of(scene.oracle(name), scene.prompts[name])
        size = expected.shape[1]
        torch.testing.assert_close(
            logits[:, :size], expected, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert (logits[:, size:] == -torch.inf).all(), name
    engine.check_integrity()


def check_greedy(engine: Engine, scene: Scene) -> None:
    selections = selections_of(engine, scene)
    requests = [
        make_request(name or "base", scene.prompts[name], selection, max_tokens=NUM_TOKENS)
        for name, selection in selections.items()
    ]
    answers = run_all(engine, requests)
    for name in selections:
        expected = greedy(scene.oracle(name), scene.prompts[name], NUM_TOKENS)
        assert answers[name or "base"] == expected, name


@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=pytest.mark.slow), "numba"])
def test_all_kinds_in_one_batch_equal_peft(
    kernels: str, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "numba":
        pytest.importorskip("numba")
        monkeypatch.delenv("LORAMUX_KERNELS", raising=False)
    else:
        monkeypatch.setenv("LORAMUX_KERNELS", kernels)
    engine = make_engine(scene.model, tmp_path, device_memory_bytes=32 * 2**20)
    check_logits(engine, scene)
    check_greedy(engine, scene)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_are_upcast_as_peft_does(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_transformers_model("llama31", num_hidden_layers=2)
    engine = make_engine(model, tmp_path / "model", device_memory_bytes=32 * 2**20)
    for name in ("lora", "dora", "lora_bias", "lokr"):
        folder = make_kind(name, model, tmp_path / name)
        file = folder / "adapter_model.safetensors"
        save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file)
        oracle = load_kind(name, model, folder)
        prompt = make_prompt(5, seed=1, vocab_size=model.config.vocab_size)
        selection = ((engine.register_adapter(folder).cid, 1.0),)
        (logits,) = engine.prompt_logits([(prompt, selection)])
        expected = logits_of(oracle, prompt)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(logits, logits_of(model, prompt), atol=1e-3)


def test_norms_that_no_part_replaces_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_transformers_model("gemma2", num_hidden_layers=2)
    engine = make_engine(model, tmp_path / "model")
    for _, name in sorted(REFUSED):
        folder = make_kind(name, model, tmp_path / name)
        with pytest.raises(AdapterRefused, match="post_attention_layernorm"):
            engine.register_adapter(folder)


def test_sums_of_parts_are_sums_of_deltas(tmp_path: Path) -> None:
    """A sum acts as if each adapter were merged: W + sum of weight * (merged W - W)."""
    model = tiny_transformers_model("llama31", num_hidden_layers=2)
    names = ("dora", "bias_lora_only", "ia3", "lora", "lora_head", "lora_embedding", "norm_tuning")
    weights = (0.7, -0.5, 1.3, 0.4, 0.6, -0.8, 0.9)
    engine = make_engine(model, tmp_path / "model", device_memory_bytes=32 * 2**20)
    selection = []
    summed = copy.deepcopy(model)
    # IA3's input scale of down_proj is served as a gain of up_proj, and so it is in the sum.
    deltas = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for number, (name, weight) in enumerate(zip(names, weights, strict=True)):
        folder = make_kind(name, model, tmp_path / name, seed=number)
        selection.append((engine.register_adapter(folder).cid, weight))
        for key, value in merged_state(name, model, folder).items():
            deltas[key] += weight * (value - model.state_dict()[key])
    summed.load_state_dict({k: v + deltas[k] for k, v in model.state_dict().items()})
    prompt = make_prompt(9, seed=5)
    (found,) = engine.prompt_logits([(prompt, compose(selection))])
    torch.testing.assert_close(found, logits_of(summed, prompt), atol=1e-4, rtol=1e-4)


def merged_state(name: str, model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the base with the adapter merged by PEFT."""
    state = load_kind(name, model, folder).merge_and_unload().state_dict()
    if name == "ia3":
        for key in [key for key in state if key.endswith("down_proj.weight")]:
            base = model.state_dict()[key]
            columns = state[key].norm(dim=0) / base.norm(dim=0)
            signs = (state[key] * base).sum(dim=0).sign()
            up = key.replace("down_proj", "up_proj")
            state[up] = state[up] * (columns * signs)[:, None]
            bias = up.replace("weight", "bias")
            state[bias] = state[bias] * columns * signs
            state[key] = base
    return {key: value for key, value in state.items() if key in model.state_dict()}


@pytest.mark.parametrize("name", ["saved_head", "trained_tokens", "oft", "added_tokens"])
def test_adapters_that_replace_weights_are_refused_in_sums(name: str, tmp_path: Path) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=2)
    engine = make_engine(model, tmp_path / "model", device_memory_bytes=32 * 2**20)
    cids = [
        engine.register_adapter(make_kind(kind, model, tmp_path / kind)).cid
        for kind in (name, "lora")
    ]
    for selection in ([(cids[0], 1.0), (cids[1], 1.0)], [(cids[0], 0.5)]):
        with pytest.raises(InvalidRequest, match="cannot be used"):
            engine.add(make_request("r", make_prompt(4, seed=1), compose(selection)))
    assert run_all(engine, [make_request("r", make_prompt(4, seed=1), ((cids[0], 1.0),))])["r"]


@pytest.mark.slow
def test_the_kernels_of_a_gpu_equal_peft(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="no Triton on this machine")
    engine, _ = device_engine(monkeypatch, scene.model, tmp_path, device_memory_bytes=32 * 2**20)
    check_logits(engine, scene)
