"""What LoRAX takes for granted and never checks: here each is true, or an error that says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from loramux.backend.host import Health
from loramux.errors import UnsupportedModel
from loramux.models.architectures import parse_config
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.model_factory import tiny_transformers_model
from tests.serve_factory import running_server
from tests.unit.server.asgi_client import events_of, get, make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend
from tests.unit.server.test_streaming import dies_after_two

NUM_ADAPTERS = 12
POOL = "96KiB"
"""Room for some of the adapters beside the sequences of a batch."""


@dataclass
class Scene:
    url: str
    folder: Path
    alone: dict[str, str] = field(default_factory=dict)

    def post(self, inputs: str = "hello", stream: bool = False, **parameters: Any) -> Any:
        body = {"inputs": inputs, "parameters": {"max_new_tokens": 6, **parameters}}
        path = "/generate_stream" if stream else "/generate"
        return httpx.post(self.url + path, json=body, timeout=120)

    def generate(self, adapter: str) -> str:
        reply = self.post(adapter_id=adapter)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["generated_text"])

    def refusal(self, status: int, **parameters: Any) -> str:
        reply = self.post(**parameters)
        assert reply.status_code == status, reply.text
        return str(reply.json()["error"])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("lorax")
    model = save_model_with_tokenizer(folder / "model")
    roots = folder / "adapters"
    flags = ["--model", str(folder / "model"), "--device", "cpu", "--device-memory", POOL]
    flags += ["--dtype", "float32", "--allowed-roots", str(roots), "--lora-modules"]
    for number in range(NUM_ADAPTERS):
        rank = (2, 4, 8)[number % 3]
        adapter = make_peft_adapter(roots / f"a{number}", model, seed=number, r=rank)
        flags.append(f"a{number}={adapter}")
    other = tiny_transformers_model("llama", vocab_size=512, hidden_size=128)
    make_peft_adapter(roots / "other-base", other, r=4)
    make_peft_adapter(roots / "truncated", model, r=4)
    weights = roots / "truncated" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with running_server(folder / "log", *flags) as server:
        yield Scene(server.url, roots)


def test_1_a_model_of_an_unknown_type_ends_the_start() -> None:
    config = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM is not supported; valid values"):
        parse_config(config)


@pytest.mark.slow
def test_2_weights_of_a_merge_are_counted_by_the_server(scene: Scene) -> None:
    merged = {"ids": ["a0", "a3"], "weights": [1.0], "merge_strategy": "linear"}
    assert "must match" in scene.refusal(422, merged_adapters=merged)


@pytest.mark.slow
def test_3_damaged_files_and_those_of_another_base_are_refused(scene: Scene) -> None:
    for name in ("other-base", "truncated"):
        asked = {"adapter_id": str(scene.folder / name), "adapter_source": "local"}
        reason = scene.refusal(424, **asked)
        assert "shape" in reason or "bytes" in reason or "q_proj" in reason, reason


@pytest.mark.slow
def test_4_and_7_ranks_and_the_number_of_adapters_need_no_limit_of_the_operator(
    scene: Scene,
) -> None:
    """More than fit, of three ranks, in one batch: nothing fails."""
    names = [f"a{number}" for number in range(NUM_ADAPTERS)]
    scene.alone |= {name: scene.generate(name) for name in names}
    with ThreadPoolExecutor(NUM_ADAPTERS) as threads:
        assert dict(zip(names, threads.map(scene.generate, names), strict=True)) == scene.alone
    stats = httpx.get(f"{scene.url}/v1/stats").json()
    device = next(tier for tier in stats["tiers"] if tier["tier"] == "device")
    assert device["evictions"] > 0 and device["failures"] == 0
    assert device["adapters"] < NUM_ADAPTERS if "adapters" in device else True


@pytest.mark.slow
def test_5_an_adapter_that_is_asked_for_again_and_again_stays_on_the_device(scene: Scene) -> None:
    """Scores by use and cost decide, not a timer: bursts of others do not push it out."""
    for number in range(1, 12):
        for _ in range(3):
            scene.generate("a0")
        scene.generate(f"a{number}")
    entry = httpx.get(f"{scene.url}/v1/adapters/a0").json()
    assert entry["tier"] == "device"


@pytest.mark.slow
def test_6_answers_belong_to_their_requests_in_any_order(scene: Scene) -> None:
    names = [f"a{number % NUM_ADAPTERS}" for number in range(24)][::-1]
    alone = {name: scene.alone.get(name) or scene.generate(name) for name in set(names)}
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(scene.generate, names))
    assert found == [alone[name] for name in names]


def test_8_a_stream_that_breaks_never_looks_complete() -> None:
    text = post(make_app(ScriptedBackend(dies_after_two)), "/generate_stream", {"inputs": "x"}).text
    events = events_of(text)
    assert events[-1].keys() == {"error", "error_type"}
    assert not any(event.get("generated_text") for event in events)


def test_9_health_generates_and_loads() -> None:
    backend = ScriptedBackend()

    def broken(timeout_s: float) -> dict[str, float]:
        raise RuntimeError("adapters cannot be loaded")

    backend.probe_script = broken
    app = make_app(backend)
    assert backend.health is Health.READY and get(app, "/health").status_code == 200
    assert get(app, "/startup").status_code == 500
    deep = get(app, "/health?deep=1")
    assert deep.status_code == 503 and "adapters cannot be loaded" in json.dumps(deep.json())


@pytest.mark.slow
def test_10_an_id_that_does_not_fit_its_source_is_named(scene: Scene) -> None:
    token = "hf_secret_token"
    for source, name, words in (
        ("s3", "acme/sql", "s3"),
        ("hub", "/etc/passwd", "hub"),
        ("local", "../../etc", "the path has"),
        ("pbase", "acme/sql", "pbase"),
        ("ftp", "acme/sql", "not a source"),
    ):
        asked = {"adapter_id": name, "adapter_source": source, "api_token": token}
        reply = scene.post(**asked)
        assert reply.status_code in (422, 424), reply.text
        assert reply.json()["error_type"] in ("validation", "generation")
        assert token not in reply.text
        assert words in reply.text.lower(), f"{source}: {reply.text}"
    assert token not in (scene.folder.parent / "log").read_text()
