"""Embeddings over HTTP against the hidden states of transformers and PEFT, by the real clients."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
import torch
from openai import OpenAI

from loramux.engine.tokenizer import Tokenizer
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.serve_factory import running_server

pytestmark = pytest.mark.slow

TEXTS = ["hello there", "a longer text of some more words", "x"]


@dataclass
class Scene:
    url: str
    models: dict[str, Any]
    tokenizer: Tokenizer

    @torch.inference_mode()
    def expected(self, text: str | list[int], model: str = "tiny") -> np.ndarray:
        token_ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        found = self.models[model](torch.tensor([token_ids]), output_hidden_states=True)
        mean: np.ndarray = found.hidden_states[-1][0].mean(0).numpy()
        return mean / np.linalg.norm(mean)

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        reply = httpx.post(self.url + path, json=body, timeout=60)
        assert reply.status_code == status, reply.text
        return reply.json()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    from peft import PeftModel

    folder = tmp_path_factory.mktemp("embeddings")
    model = save_model_with_tokenizer(folder / "model")
    models = {"tiny": model}
    flags = ["--model", str(folder / "model"), "--device", "cpu", "--device-memory", "64MiB"]
    flags += ["--served-model-name", "tiny", "--pooling", "mean", "--dtype", "float32"]
    for number, name in enumerate(("one", "two")):
        adapter = make_peft_adapter(folder / name, model, r=4, seed=number)
        copy = save_model_with_tokenizer(folder / f"of-{name}")
        models[name] = PeftModel.from_pretrained(copy, adapter).eval()
        flags += ["--lora-modules", f"{name}={adapter}"]
    with running_server(folder / "log", *flags) as server:
        yield Scene(server.url, models, Tokenizer(folder / "model"))


@pytest.fixture
def client(scene: Scene) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{scene.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("model", ["tiny", "one", "two"])
def test_openai_client(client: OpenAI, scene: Scene, model: str) -> None:
    """The client asks for base64 on its own."""
    found = client.embeddings.create(model=model, input=TEXTS)
    assert found.model == model
    num_tokens = sum(len(scene.tokenizer.encode(text)) for text in TEXTS)
    assert found.usage.prompt_tokens == found.usage.total_tokens == num_tokens
    for index, (entry, text) in enumerate(zip(found.data, TEXTS, strict=True)):
        assert entry.index == index
        np.testing.assert_allclose(entry.embedding, scene.expected(text, model), atol=1e-4)


def test_token_ids_and_numbers(client: OpenAI, scene: Scene) -> None:
    for given in ([5, 6, 7], [[5, 6, 7], [9, 8]]):
        found = client.embeddings.create(model="tiny", input=given, encoding_format="float")
        lists = given if isinstance(given[0], list) else [given]
        for entry, token_ids in zip(found.data, lists, strict=True):
            np.testing.assert_allclose(entry.embedding, scene.expected(token_ids), atol=1e-4)


def test_base64_is_little_endian_float32(scene: Scene) -> None:
    body = {"input": "hello", "encoding_format": "base64", "model": "one"}
    (entry,) = scene.post("/v1/embeddings", body)["data"]
    found = np.frombuffer(base64.b64decode(entry["embedding"]), dtype="<f4")
    np.testing.assert_allclose(found, scene.expected("hello", "one"), atol=1e-4)


def test_a_sum_of_adapters_is_another_embedding(scene: Scene) -> None:
    texts = {"input": "hello there", "model": "one+0.5*two"}
    summed = scene.post("/v1/embeddings", texts)["data"][0]["embedding"]
    fields = {"adapters": ["one", "two"], "adapter_weights": [1.0, 0.5]}
    same = scene.post("/v1/embeddings", {"input": "hello there", **fields})["data"][0]["embedding"]
    np.testing.assert_allclose(summed, same, atol=1e-6)
    assert np.abs(summed - scene.expected("hello there", "one")).max() > 1e-3


def test_embeddings_beside_generation_are_the_same(client: OpenAI, scene: Scene) -> None:
    def embed(number: int) -> None:
        model, text = ("tiny", "one", "two")[number % 3], TEXTS[number % 2]
        found = client.embeddings.create(model=model, input=text).data[0].embedding
        np.testing.assert_allclose(found, scene.expected(text, model), atol=1e-4)

    def generate(number: int) -> str:
        reply = client.completions.create(
            model=("tiny", "one")[number % 2], prompt="hello", max_tokens=20, temperature=0
        )
        return reply.choices[0].text

    alone = [generate(0), generate(1)]
    with ThreadPoolExecutor(8) as threads:
        texts = [threads.submit(generate, number) for number in range(6)]
        vectors = [threads.submit(embed, number) for number in range(12)]
        assert [text.result() for text in texts] == alone * 3
        assert all(vector.result() is None for vector in vectors)


def test_what_cannot_be_honoured_is_refused(client: OpenAI, scene: Scene) -> None:
    with pytest.raises(openai.BadRequestError, match="Matryoshka"):
        client.embeddings.create(model="tiny", input="hello", dimensions=8)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nope", input="hello")
    for body, param in (
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "lora_path": "one"}, "lora_path"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": [999_999]}, "input"),
    ):
        error = scene.post("/v1/embeddings", body, status=400)["error"]
        assert error["param"] == param, error


def test_truncation_keeps_the_tokens_that_are_asked_for(scene: Scene) -> None:
    token_ids = list(range(5, 25))
    for side, kept in (("left", token_ids[-4:]), ("right", token_ids[:4])):
        body = {"input": token_ids, "truncate_prompt_tokens": 4, "truncation_side": side}
        found = scene.post("/v1/embeddings", body)
        assert found["usage"]["prompt_tokens"] == 4
        np.testing.assert_allclose(found["data"][0]["embedding"], scene.expected(kept), atol=1e-4)


def test_pooling_route(scene: Scene) -> None:
    found = scene.post("/pooling", {"input": TEXTS, "model": "two"})
    for entry, text in zip(found["data"], TEXTS, strict=True):
        assert entry["object"] == "pooling"
        np.testing.assert_allclose(entry["data"], scene.expected(text, "two"), atol=1e-4)


def test_receipts_and_metrics_count_it(scene: Scene) -> None:
    reply = httpx.post(scene.url + "/v1/embeddings", json={"input": "hello", "model": "one"})
    serving = reply.json()["serving"]
    assert serving["adapters"][0]["name"] == "one"
    assert serving["id"] == reply.headers["x-loramux-receipt"]


def test_scores_are_cosines_of_the_embeddings(scene: Scene) -> None:
    query, *documents = TEXTS
    expected = [float(scene.expected(query, "one") @ scene.expected(d, "one")) for d in documents]
    found = scene.post("/score", {"model": "one", "text_1": query, "text_2": documents})
    np.testing.assert_allclose([one["score"] for one in found["data"]], expected, atol=1e-4)
    ranked = scene.post("/v1/rerank", {"model": "one", "query": query, "documents": documents})
    scores = [one["relevance_score"] for one in ranked["results"]]
    np.testing.assert_allclose(scores, sorted(expected, reverse=True), atol=1e-4)
    error = scene.post("/classify", {"input": "x"}, status=400)["error"]
    assert "not a sequence classifier" in error["message"]


def test_embeddings_of_other_servers_apis(scene: Scene) -> None:
    text = TEXTS[1]
    base, adapted = scene.expected(text), scene.expected(text, "two")
    found = scene.post("/embed", {"inputs": text, "parameters": {"adapter_id": "two"}})
    np.testing.assert_allclose(found["embeddings"], adapted, atol=1e-4)
    found = scene.post("/api/embed", {"model": "two:latest", "input": [text, text]})
    np.testing.assert_allclose(found["embeddings"], [adapted] * 2, atol=1e-4)
    assert found["prompt_eval_count"] == 2 * len(scene.tokenizer.encode(text))
    found = scene.post("/api/embeddings", {"model": "tiny", "prompt": text})
    np.testing.assert_allclose(found["embedding"], base, atol=1e-4)
    found = scene.post("/invocations", {"input": text, "encoding_format": "float"})
    np.testing.assert_allclose(found["data"][0]["embedding"], base, atol=1e-4)
    assert scene.post("/invocations", {"query": text, "documents": [text]})["results"]
    assert "error_type" in scene.post("/embed", {"inputs": ""}, status=422)
    assert scene.post("/api/embed", {"model": "tiny", "input": []}, status=400)


def test_feature_extraction_of_hugging_faces_client(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import InferenceClient

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    client = InferenceClient(scene.url)
    for text in TEXTS:
        found = client.feature_extraction(text)
        assert found.shape == (1, len(scene.expected(text)))
        np.testing.assert_allclose(found[0], scene.expected(text), atol=1e-4)
    assert isinstance(client.text_generation("hello", max_new_tokens=3), str)
