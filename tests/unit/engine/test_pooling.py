"""Vectors of prompts in mixed batches against the hidden states of transformers and PEFT."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from loramux.engine.engine import Engine
from loramux.types.composition import compose
from loramux.types.pooling import Pooling
from loramux.types.request import FinishReason, Request, Selection, TokenEvent
from loramux.types.vectors import vector_of
from tests.adapter_factory import make_peft_adapter
from tests.device_factory import device_engine
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.kinds_factory import load_kind, make_kind
from tests.memory_factory import InlineExecutor
from tests.model_factory import MODEL_CLASSES, tiny_config, tiny_transformers_model
from tests.unit.engine.test_alora import INVOCATION, invoked

KINDS = ("lora", "dora", "bias_all", "saved_embedding", "saved_norms", "lora_head", "ia3")
BUDGET = 32
"""Tokens of a step, so that long prompts are computed in chunks."""


class Scene:
    """A tiny model with an adapter of several kinds, and PEFT's models of them."""

    def __init__(self, family: str, folder: Path, kinds: Iterable[str]) -> None:
        self.model = tiny_transformers_model(family, num_hidden_layers=2)
        self.folders = {
            name: make_kind(name, self.model, folder / name, seed=number)
            for number, name in enumerate(kinds)
        }
        self.oracles = {"": self.model} | {
            name: load_kind(name, self.model, path) for name, path in self.folders.items()
        }

    def select(self, engine: Engine) -> dict[str, Selection]:
        cids = {name: engine.register_adapter(path).cid for name, path in self.folders.items()}
        return {"": ()} | {name: ((cid, 1.0),) for name, cid in cids.items()}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene("llama31", tmp_path_factory.mktemp("pooling"), KINDS)


@torch.inference_mode()
def expected_vector(model: Any, tokens: tuple[int, ...], pooling: Pooling) -> np.ndarray:
    hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    pooled: np.ndarray = (hidden[-1] if pooling is Pooling.LAST else hidden.mean(0)).numpy()
    return pooled


def embed_request(
    name: str, prompt: tuple[int, ...], selection: Selection = (), pooling: Pooling = Pooling.LAST
) -> Request:
    request = make_request(name, prompt, selection, max_tokens=0)
    return msgspec.structs.replace(request, pooling=pooling)


def run(engine: Engine, requests: list[Request]) -> dict[str, list[TokenEvent]]:
    found: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            found[event.request_id].append(event)
        engine.check_integrity()
    return found


def vectors(engine: Engine, requests: list[Request]) -> dict[str, np.ndarray]:
    events = run(engine, requests)
    for request in requests:
        if request.pooling is not None:
            assert [e.finish_reason for e in events[request.request_id]] == [FinishReason.STOP]
    return {
        name: vector_of(found[-1].pooled)
        for name, found in events.items()
        if found[-1].pooled is not None
    }


def check_mixed_batch(engine: Engine, scene: Scene) -> None:
    selections = scene.select(engine)
    prompts = {name: make_prompt(9 + 11 * n, seed=n) for n, name in enumerate(selections)}
    requests, cases = [], {}
    for name, selection in selections.items():
        for pooling in (Pooling.LAST, Pooling.MEAN):
            key = f"{name}-{pooling}"
            cases[key] = (name, pooling)
            requests.append(embed_request(key, prompts[name], selection, pooling))
        requests.append(make_request(f"{name}-text", make_prompt(5, seed=3), selection))
    texts = [request for request in requests if request.pooling is None]
    expected_texts = run_all(engine, texts)
    events = run(engine, requests)
    for key, (name, pooling) in cases.items():
        expected = expected_vector(scene.oracles[name], prompts[name], pooling)
        found = vector_of(events[key][-1].pooled or b"")
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4, err_msg=key)
    for request in texts:
        tokens = [event.token_id for event in events[request.request_id]]
        assert tokens == expected_texts[request.request_id]


@pytest.mark.parametrize("kernels", ["torch", "cpu", "numba"])
def test_vectors_equal_pefts_in_a_batch_with_generation(
    kernels: str, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "numba":
        pytest.importorskip("numba")
        monkeypatch.delenv("LORAMUX_KERNELS", raising=False)
    else:
        monkeypatch.setenv("LORAMUX_KERNELS", kernels)
    engine = make_engine(
        scene.model, tmp_path, device_memory_bytes=32 * 2**20, max_batch_tokens=BUDGET
    )
    check_mixed_batch(engine, scene)


@pytest.mark.slow
def test_vectors_equal_pefts_with_interpreted_gpu_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    scene = Scene("llama31", tmp_path / "adapters", ["lora", "dora", "saved_norms"])
    settings = {"device_memory_bytes": 32 * 2**20, "max_batch_tokens": BUDGET}
    engine, _ = device_engine(monkeypatch, scene.model, tmp_path / "model", **settings)
    check_mixed_batch(engine, scene)


def test_a_vector_does_not_depend_on_the_batch(scene: Scene, tmp_path: Path) -> None:
    engine = make_engine(scene.model, tmp_path, device_memory_bytes=32 * 2**20)
    selections = scene.select(engine)
    prompt = make_prompt(20, seed=4)
    for pooling in (Pooling.LAST, Pooling.MEAN):
        probe = embed_request("probe", prompt, selections["dora"], pooling)
        others = [
            embed_request(f"{n}", make_prompt(7 + n, seed=n), selection, pooling)
            for n, selection in enumerate(selections.values())
        ]
        alone = vectors(engine, [probe])["probe"]
        together = vectors(engine, [*others, probe])["probe"]
        np.testing.assert_allclose(together, alone, atol=1e-6)


def test_the_last_token_reuses_a_cached_prefix_and_the_mean_does_not(
    scene: Scene, tmp_path: Path
) -> None:
    engine = make_engine(scene.model, tmp_path, device_memory_bytes=32 * 2**20)
    prompt = make_prompt(60, seed=5)
    run(engine, [make_request("text", prompt)])
    for pooling, num_reused in ((Pooling.LAST, 48), (Pooling.MEAN, 0)):
        (event,) = run(engine, [embed_request("again", prompt, (), pooling)])["again"]
        assert event.num_reused == num_reused
        expected = expected_vector(scene.model, prompt, pooling)
        np.testing.assert_allclose(vector_of(event.pooled or b""), expected, atol=1e-4)


def test_sums_of_adapters_equal_the_weighted_merge(scene: Scene, tmp_path: Path) -> None:
    engine = make_engine(scene.model, tmp_path, device_memory_bytes=32 * 2**20)
    parts = {"lora": 0.7, "bias_all": -0.4}
    cids = [(engine.register_adapter(scene.folders[name]).cid, w) for name, w in parts.items()]
    base = scene.model.state_dict()
    total = {key: value.clone() for key, value in base.items()}
    for name, weight in parts.items():
        merged = load_kind(name, scene.model, scene.folders[name]).merge_and_unload().state_dict()
        for key in total:
            total[key] += weight * (merged[key] - base[key])
    summed = tiny_transformers_model("llama31", num_hidden_layers=2)
    summed.load_state_dict(total)
    prompt = make_prompt(21, seed=6)
    for pooling in (Pooling.LAST, Pooling.MEAN):
        found = vectors(engine, [embed_request("sum", prompt, compose(cids), pooling)])["sum"]
        expected = expected_vector(summed, prompt, pooling)
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_an_alora_pools_as_peft_does(tmp_path: Path) -> None:
    from peft import PeftModel

    model = tiny_transformers_model("llama", num_hidden_layers=2)
    folder = make_peft_adapter(tmp_path / "alora", model, alora_invocation_tokens=list(INVOCATION))
    adapted = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    engine = make_engine(model, tmp_path / "model", device_memory_bytes=16 * 2**20)
    selection = ((engine.register_adapter(folder).cid, 1.0),)
    prompt = invoked(21, 9)
    for pooling in (Pooling.LAST, Pooling.MEAN):
        found = vectors(engine, [embed_request("alora", prompt, selection, pooling)])["alora"]
        np.testing.assert_allclose(found, expected_vector(adapted, prompt, pooling), atol=1e-4)


def test_preemption_begins_the_sum_anew(scene: Scene, tmp_path: Path) -> None:
    """Two long prompts do not fit at once: one of them is preempted between its chunks."""
    engine = make_engine(
        scene.model,
        tmp_path,
        loads=InlineExecutor(),
        device_memory_bytes=14 * page_bytes(scene),
        max_batch_tokens=16,
    )
    prompts = {f"{n}": make_prompt(120, seed=n) for n in range(2)}
    texts = [make_request(f"text{n}", make_prompt(60, seed=9 + n), max_tokens=40) for n in range(2)]
    requests = [embed_request(key, p, (), Pooling.MEAN) for key, p in prompts.items()]
    found = vectors(engine, [*texts, *requests])
    assert engine.scheduler.num_preemptions > 0
    for key, prompt in prompts.items():
        expected = expected_vector(scene.model, prompt, Pooling.MEAN)
        np.testing.assert_allclose(found[key], expected, atol=1e-4)


def page_bytes(scene: Scene) -> int:
    config = scene.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    size = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 16 * 4
    return int(size)


def test_an_aborted_request_frees_its_pages(scene: Scene, tmp_path: Path) -> None:
    engine = make_engine(scene.model, tmp_path, max_batch_tokens=16)
    engine.add(embed_request("gone", make_prompt(100, seed=1), (), Pooling.MEAN))
    assert engine.step() == []
    engine.abort("gone")
    engine.check_integrity()
    assert not engine.has_work


def test_hidden_states_that_are_no_numbers_end_the_request(scene: Scene, tmp_path: Path) -> None:
    broken = tiny_transformers_model("llama31", num_hidden_layers=2)
    with torch.no_grad():
        broken.model.embed_tokens.weight[5] = math.nan
    engine = make_engine(broken, tmp_path)
    good = make_prompt(9, seed=2)
    good = tuple(token for token in good if token != 5)
    requests = [
        embed_request("bad", (4, 5, 6)),
        embed_request("mean", (4, 5, 6, 7), (), Pooling.MEAN),
    ]
    events = run(engine, [*requests, embed_request("good", good)])
    for name in ("bad", "mean"):
        assert events[name][-1].error_code == "numeric"
        assert events[name][-1].pooled is None
    expected = expected_vector(scene.model, good, Pooling.LAST)
    np.testing.assert_allclose(vector_of(events["good"][-1].pooled or b""), expected, atol=1e-4)


def make_classifier(family: str, folder: Path) -> tuple[Any, Any]:
    """Make a classifier with three labels, and PEFT's adapter of it with a head of its own."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = tiny_config(family, num_labels=3, num_hidden_layers=2)
    name = MODEL_CLASSES[type(config).__name__].replace("CausalLM", "SequenceClassification")
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, init_lora_weights=False)
    lora.target_modules = ["q_proj", "v_proj"]
    adapted = get_peft_model(copy.deepcopy(model), lora)
    adapted.base_model.model.score.modules_to_save["default"].weight.data.normal_()
    adapted.save_pretrained(folder)
    return model.eval(), adapted.eval()


def check_classifier(engine: Engine, models: tuple[Any, Any], folder: Path) -> None:
    cid = engine.register_adapter(folder).cid
    cases = {
        f"{which}-{n}": (which, make_prompt(5 + 9 * n, seed=n))
        for n in range(3)
        for which in range(2)
    }
    requests = [
        embed_request(key, prompt, ((cid, 1.0),) if which else (), Pooling.HEAD)
        for key, (which, prompt) in cases.items()
    ]
    for key, found in vectors(engine, requests).items():
        which, prompt = cases[key]
        with torch.inference_mode():
            expected = models[which](torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_outputs_of_classification_heads_equal_pefts(family: str, tmp_path: Path) -> None:
    models = make_classifier(family, tmp_path / "adapter")
    engine = make_engine(models[0], tmp_path / "model")
    check_classifier(engine, models, tmp_path / "adapter")


@pytest.mark.slow
def test_outputs_of_classification_heads_with_interpreted_gpu_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    models = make_classifier("llama", tmp_path / "adapter")
    settings = {"device_memory_bytes": 32 * 2**20, "max_batch_tokens": BUDGET}
    engine, _ = device_engine(monkeypatch, models[0], tmp_path / "model", **settings)
    check_classifier(engine, models, tmp_path / "adapter")
