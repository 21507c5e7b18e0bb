"""Scores over HTTP: a live sequence classifier against transformers, and other models' answers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
import transformers

from tests.model_factory import save_hf_folder, tiny_config
from tests.serve_factory import running_server
from tests.tokenizer_factory import save_byte_level

pytestmark = pytest.mark.slow

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "Bread", "Rome is old, and the capital of Italy."]


@dataclass
class Scene:
    url: str
    models: dict[str, Any]
    tokenizer: Any

    @torch.inference_mode()
    def logits(self, *texts: str, model: str = "judge") -> np.ndarray:
        token_ids = self.tokenizer(*texts, return_tensors="pt")["input_ids"]
        found: np.ndarray = self.models[model](token_ids).logits[0].numpy()
        return found

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        reply = httpx.post(self.url + path, json=body, timeout=60)
        assert reply.status_code == status, reply.text
        return reply.json()


def save_classifier(folder: Path, num_labels: int) -> Any:
    config = tiny_config("qwen2", num_labels=num_labels, vocab_size=512)
    torch.manual_seed(num_labels)
    model = transformers.Qwen2ForSequenceClassification._from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    save_hf_folder(model, folder)
    save_byte_level(folder)
    return model.eval()


def save_adapter(folder: Path, model: Any) -> Any:
    """Save an adapter with a head of its own, as PEFT trains them; return PEFT's model."""
    from peft import LoraConfig, TaskType, get_peft_model

    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), lora)
    adapted.base_model.model.score.modules_to_save["default"].weight.data.normal_()
    adapted.save_pretrained(folder)
    return adapted.eval()


def scene_of(folder: Path, num_labels: int) -> Iterator[Scene]:
    model = save_classifier(folder / "model", num_labels)
    flags = ["--model", str(folder / "model"), "--device", "cpu", "--device-memory", "64MiB"]
    flags += ["--served-model-name", "judge", "--dtype", "float32"]
    models = {"judge": model, "own": save_adapter(folder / "own", model)}
    flags += ["--lora-modules", f"own={folder / 'own'}"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    with running_server(folder / "log", *flags) as server:
        yield Scene(server.url, models, tokenizer)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    yield from scene_of(tmp_path_factory.mktemp("reranker"), 1)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_the_outputs_of_the_head(reranker: Scene, path: str) -> None:
    expected = np.array([reranker.logits(QUERY, text)[0] for text in DOCUMENTS])
    raw = reranker.post(path, text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
    np.testing.assert_allclose([one["score"] for one in raw["data"]], expected, atol=1e-4)
    found = reranker.post(path, queries=QUERY, documents=DOCUMENTS)
    scores = [one["score"] for one in found["data"]]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-expected)), atol=1e-4)
    assert [one["index"] for one in found["data"]] == [0, 1, 2]
    pairs = reranker.post(path, text_1=[QUERY, "Bread"], text_2=DOCUMENTS[:2])
    assert pairs["data"][0]["score"] == pytest.approx(scores[0], abs=1e-6)
    assert pairs["data"][1]["score"] != pytest.approx(scores[1])


def test_documents_are_ranked_by_their_scores(reranker: Scene) -> None:
    expected = [float(reranker.logits(QUERY, text)[0]) for text in DOCUMENTS]
    order = sorted(range(3), key=lambda index: -expected[index])
    documents: list[Any] = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = reranker.post(path, query=QUERY, documents=documents, model="judge")
        assert [one["index"] for one in found["results"]] == order
        assert [one["document"]["text"] for one in found["results"]] == [
            DOCUMENTS[index] for index in order
        ]
    top = reranker.post(
        "/rerank", query=QUERY, documents=documents, top_n=1, return_documents=False
    )
    assert [one["index"] for one in top["results"]] == order[:1]
    assert "document" not in top["results"][0]
    assert top["usage"]["total_tokens"] > 0


def test_labels_of_a_classifier(reranker: Scene) -> None:
    expected = 1 / (1 + np.exp(-reranker.logits("good soup")))
    (entry,) = reranker.post("/classify", input="good soup")["data"]
    np.testing.assert_allclose(entry["probs"], expected, atol=1e-4)
    assert (entry["label"], entry["num_classes"]) == ("LABEL_0", 1)
    raw = reranker.post("/classify", input=["good soup"], use_activation=False)["data"][0]
    np.testing.assert_allclose(raw["probs"], reranker.logits("good soup"), atol=1e-4)


def test_an_adapter_brings_its_own_head(reranker: Scene) -> None:
    for model in ("own", "judge"):
        found = reranker.post(
            "/score", model=model, text_1=QUERY, text_2=DOCUMENTS, use_activation=False
        )
        expected = [reranker.logits(QUERY, text, model=model)[0] for text in DOCUMENTS]
        np.testing.assert_allclose([one["score"] for one in found["data"]], expected, atol=1e-4)


def test_what_a_classifier_cannot_do_is_refused(reranker: Scene) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        error = reranker.post(path, 400, **body)["error"]
        assert error["param"] == "model" and "/classify" in error["message"], error
    for body, param in (
        ({"text_1": QUERY}, "text_2"),
        ({"text_1": QUERY, "text_2": []}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "text_2": "b", "documents": "c"}, "queries"),
        ({"text_1": "a", "text_2": "b", "lora_path": "c"}, "lora_path"),
    ):
        assert reranker.post("/score", 400, **body)["error"]["param"] == param
    assert reranker.post("/rerank", 400, query="a", documents=["b"], top_n=-1)["error"]["param"]
    assert reranker.post("/score", 404, text_1="a", text_2="b", model="nope")


@pytest.mark.slow
def test_several_labels(tmp_path: Path) -> None:
    for scene in scene_of(tmp_path, 3):
        texts = ["good soup", "cold soup and a rude waiter"]
        found = scene.post("/classify", input=texts)["data"]
        for entry, text in zip(found, texts, strict=True):
            logits = scene.logits(text)
            probs = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(entry["probs"], probs, atol=1e-4)
            assert entry["label"] == f"LABEL_{logits.argmax()}"
        error = scene.post("/score", 400, text_1="a", text_2="b")["error"]
        assert "has 3 labels" in error["message"] and "/classify" in error["message"]
