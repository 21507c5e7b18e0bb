"""HTTP requests for an adapter with its own tokenizer, to a real engine process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from loramux.config.engine import EngineConfig
from loramux.engine.async_engine import AsyncEngine, AsyncEngineOptions
from loramux.errors import AdapterRefused
from loramux.server.app import create_app
from loramux.server.context import ServerOptions
from loramux.server.naming.names import AdapterNames
from loramux.types.adapter import AdapterCard, InspectedCard
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.tokenizer_factory import save_byte_fallback

MESSAGES = [{"role": "user", "content": "The dog"}]
TEMPLATE = "{% for m in messages %}<|sql|>{{ m.content }}{% endfor %}"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Server:
    """The application over an engine process, and the event loop on which both run."""

    def __init__(self, model: Path) -> None:
        config = EngineConfig(device="cpu", device_memory_bytes=8 * 2**20, dtype="float32")
        self.engine = AsyncEngine(AsyncEngineOptions(model=model, config=config))
        self.names = AdapterNames(self.engine)
        self.app = create_app(
            self.engine, ServerOptions(allow_runtime_lora_updating=True), names=self.names
        )
        self.runner = asyncio.Runner()

    async def start(self, **adapters: Path) -> None:
        await self.engine.start()
        for name, folder in adapters.items():
            [card] = await self.engine.inspect_adapters([str(folder)])
            assert isinstance(card, AdapterCard | InspectedCard)
            self.names.bind(name, card)
            with suppress(AdapterRefused):
                await self.names.identify(name)

    def send(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        async def send() -> httpx2.Response:
            transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, json=body)

        return self.runner.run(send())

    def post(self, path: str, **body: Any) -> Any:
        return self.send("POST", path, body).json()

    def stream(self, path: str, **body: Any) -> list[Any]:
        lines = self.send("POST", path, {**body, "stream": True}).text.splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(event) for event in events if event != "[DONE]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `model` and the adapters `own`, `broken`, `foreign` and `ends`."""
    root = tmp_path_factory.mktemp("files")
    model = save_model_with_tokenizer(root / "model")
    for seed, name in enumerate(("own", "broken", "foreign", "ends")):
        make_peft_adapter(root / name, model, seed=seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(root / "model")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(root / "ends")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(root / "model")
    tokenizer.add_tokens(["<|sql|>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "own")
    (root / "broken" / "tokenizer.json").write_text("{")
    save_byte_fallback(root / "foreign")
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    served = Server(folder / "model")
    adapters = {name: folder / name for name in ("broken", "foreign", "own", "ends")}
    served.runner.run(served.start(**adapters))
    yield served
    served.runner.run(served.engine.close(drain_s=1))
    served.runner.close()


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder / "own")


def test_the_token_routes_follow_the_model(server: Server, oracle: Any) -> None:
    expected = oracle.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    answer = server.post("/tokenize", model="own", messages=MESSAGES)
    assert answer["tokens"] == expected
    assert server.post("/detokenize", model="own", tokens=expected) == {"prompt": "<|sql|>The dog"}
    base = server.post("/tokenize", messages=MESSAGES)["tokens"]
    assert base != expected and "<|im_start|>user" in oracle.decode(base)
    assert server.post("/detokenize", tokens=expected) == {"prompt": "The dog"}
    info = server.send("GET", "/tokenizer_info?model=own").json()
    assert info["chat_template"] == TEMPLATE
    assert server.send("GET", "/tokenizer_info").json()["chat_template"] != TEMPLATE


def test_added_tokens_are_streamed_as_text_and_stop_an_answer(server: Server, oracle: Any) -> None:
    sql = oracle.convert_tokens_to_ids("<|sql|>")
    forced = {"model": "own", "logit_bias": {str(sql): 100}, "temperature": 0, "max_tokens": 3}
    whole = server.post(CHAT, messages=MESSAGES, logprobs=True, **forced)["choices"][0]
    assert whole["message"]["content"] == "<|sql|>" * 3
    assert [entry["token"] for entry in whole["logprobs"]["content"]] == ["<|sql|>"] * 3
    chunks = server.stream(CHAT, messages=MESSAGES, **forced)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == "<|sql|>" * 3
    stopped = server.stream(COMPLETIONS, prompt="a", stop=["ql|><"], **forced)
    assert "".join(chunk["choices"][0]["text"] for chunk in stopped) == "<|s"
    echoed = server.post(COMPLETIONS, prompt=[sql], echo=True, **forced)["choices"][0]["text"]
    assert echoed == "<|sql|>" * 4


def test_a_tokenizer_that_does_not_fit_refuses_its_adapter_only(server: Server) -> None:
    for name in ("broken", "foreign"):
        for path in ("/tokenize", COMPLETIONS):
            response = server.send("POST", path, {"model": name, "prompt": "a"})
            assert response.status_code == 422
            assert response.json()["error"]["code"] == 422
            assert "tokenizer" in response.json()["error"]["message"]
    answer = server.post(COMPLETIONS, prompt="The", max_tokens=1)
    assert answer["choices"][0]["finish_reason"] == "length"
    # A deep health check loads the first adapter, whose tokenizer is broken.
    assert server.send("GET", "/health?deep=1").status_code == 200


def test_the_list_of_adapters_names_the_tokenizer(server: Server) -> None:
    entries = server.send("GET", "/v1/adapters").json()["data"]
    found = {entry["id"]: entry.get("tokenizer_digest") for entry in entries}
    assert found["own"].startswith("sha256:") and found["ends"] not in (None, found["own"])
    failures = {entry["id"]: entry["failure"]["code"] for entry in entries if entry.get("failure")}
    assert failures == {"broken": "broken_tokenizer", "foreign": "foreign_tokenizer"}


def test_a_load_that_is_refused_for_its_tokenizer_gives_no_name(
    server: Server, folder: Path
) -> None:
    body = {"lora_name": "late", "lora_path": str(folder / "foreign")}
    refused = server.send("POST", "/v1/load_lora_adapter", body)
    assert refused.status_code == 400 and "does not fit this base" in refused.text
    assert "late" not in server.send("GET", "/v1/models").text
    assert server.send("POST", COMPLETIONS, {"model": "late", "prompt": "a"}).status_code == 404
    body["lora_path"] = str(folder / "own")
    assert server.send("POST", "/v1/load_lora_adapter", body).status_code == 200
    answer = server.post("/tokenize", model="late", prompt="<|sql|>")
    assert answer["count"] == 1
    # In place, the name keeps the adapter that it had.
    body |= {"lora_path": str(folder / "broken"), "load_inplace": True}
    assert server.send("POST", "/v1/load_lora_adapter", body).status_code == 400
    assert server.post("/tokenize", model="late", prompt="<|sql|>")["count"] == 1
    del body["lora_path"], body["load_inplace"]
    assert server.send("POST", "/v1/unload_lora_adapter", body).status_code == 200


def test_other_servers_apis_read_and_write_by_the_adapters_tokenizer(
    server: Server, oracle: Any
) -> None:
    sql = oracle.convert_tokens_to_ids("<|sql|>")
    bias = {"logit_bias": {str(sql): 100}}
    at_zero = {"max_new_tokens": 2, "temperature": 0.0}
    sampled = server.post(
        "/generate", text="<|sql|>", lora_path="own", sampling_params=at_zero | bias
    )
    assert sampled["text"] == "<|sql|>" * 2 and sampled["output_ids"] == [sql, sql]
    assert sampled["meta_info"]["prompt_tokens"] == len(oracle("<|sql|>").input_ids)
    mixed = {"prompt": [sql, "<|sql|>"], "model": "own", "n_predict": 1, "temperature": 0.0}
    completed = server.post("/completion", n_probs=1, **mixed, **bias)
    assert completed["content"] == "<|sql|>" and completed["tokens_evaluated"] == 2
    assert completed["completion_probabilities"][0]["token"] == "<|sql|>"
    expected = oracle.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    body = {"model": "own", "messages": MESSAGES}
    counted = server.post("/v1/messages/count_tokens", **body)
    assert counted == {"input_tokens": len(expected)}
    message = server.post("/v1/messages", max_tokens=1, **body)
    assert message["usage"]["input_tokens"] == len(expected)
    lorax = {"adapter_id": "own", "max_new_tokens": 1, "decoder_input_details": True}
    generated = server.post("/generate", inputs="<|sql|>", parameters=lorax)
    assert generated["details"]["prefill"][-1] | {"logprob": 0} == {
        "id": sql,
        "text": "<|sql|>",
        "logprob": 0,
    }
    placed = server.post("/tokenize", inputs="<|sql|>", parameters={"adapter_id": "own"})
    assert [one["id"] for one in placed] == [sql]
    assert server.post("/api/show", model="own")["template"] == TEMPLATE


def test_grammars_need_the_vocabulary_of_the_base(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"model": "own", "messages": MESSAGES}
    for constrained in ({"response_format": {"type": "json_object"}}, {"tools": [tool]}):
        response = server.send("POST", CHAT, body | constrained)
        assert response.status_code == 400
        assert "own has a vocabulary of its own" in response.json()["error"]["message"]
    assert server.send("POST", CHAT, body | {"max_tokens": 1}).status_code == 200


def test_tokens_are_allowed_and_barred_by_the_adapters_tokenizer(
    server: Server, oracle: Any
) -> None:
    sql = oracle.convert_tokens_to_ids("<|sql|>")
    body = {"model": "own", "prompt": "a", "max_tokens": 3, "temperature": 0}
    allowed = server.post(COMPLETIONS, allowed_token_ids=[sql], **body)
    assert allowed["choices"][0]["text"] == "<|sql|>" * 3
    forced = body | {"logit_bias": {str(sql): 100}}
    barred = server.post(COMPLETIONS, bad_words=["<|sql|>"], **forced)
    assert "<|sql|>" not in barred["choices"][0]["text"]
    kept = server.post(COMPLETIONS, min_tokens=3, **forced)
    assert kept["choices"][0]["text"] == "<|sql|>" * 3


def test_a_grammar_ends_by_the_adapters_own_end_of_sequence(server: Server, oracle: Any) -> None:
    end = oracle.convert_tokens_to_ids("<|endoftext|>")
    body = {
        "prompt": "a",
        "structured_outputs": {"regex": "(ab)+"},
        "logit_bias": {str(end): 100, str(oracle.eos_token_id): -100},
        "max_tokens": 8,
        "temperature": 0,
    }
    choice = server.post(COMPLETIONS, model="ends", **body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    longer = server.post(COMPLETIONS, model="ends", min_tokens=4, **body)["choices"][0]
    assert longer["text"].startswith("abab") and longer["finish_reason"] == "stop"
    # The base does not end by this token, so that its grammar has no place for it.
    other = server.post(COMPLETIONS, **body)["choices"][0]["text"]
    assert other.startswith("abab") and set(other) == {*"ab"}
