"""`ModelServer` on this machine, as a script of sheaf uses it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from loramux.deploy.replica import ReplicaFailed
from loramux.errors import InvalidRequest
from loramux.specs import FleetConfig, LoRAAdapter, LoRAConfig, ModelServer, ModelSpec
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_model_with_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SLOW = 300
TINY = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    script = ROOT / "examples" / "images" / "make_tiny_model.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    model = save_model_with_tokenizer(folder / "text")
    for seed, name in enumerate(("a", "b")):
        config = lora_config_dict(r=4, lora_alpha=64, base_model_name_or_path="text")
        write_adapter(folder / name, config, lora_tensors(model.config, seed=seed))
    return folder


def text_spec(folder: Path, *names: str, **fields: Any) -> ModelSpec:
    return ModelSpec(
        name="chat",
        model_type="text",
        backend="loramux",
        backend_kwargs={"model_id": str(folder / "text")},
        lora=LoRAConfig({name: LoRAAdapter(str(folder / name)) for name in names}),
        settings={"dtype": "float32", "device_memory": "8MiB", "registry": "none"},
        fleet=FleetConfig(**fields),
    )


def image_spec(folder: Path, default: str | None = None) -> ModelSpec:
    adapters = {name: LoRAAdapter(str(folder / f"{name}.safetensors")) for name in ("ink", "night")}
    return ModelSpec(
        name="flux",
        model_type="diffusion",
        backend="flux",
        backend_kwargs={"model_id": str(folder / "model"), "torch_dtype": "float32"},
        lora=LoRAConfig(adapters, default=default),
        settings={"registry": "none"},
    )


class Scene:
    def __init__(self, server: ModelServer) -> None:
        self.server = server
        self.client = httpx2.Client(base_url=server.url, timeout=SLOW, trust_env=False)

    def tokens(self, model: str) -> str:
        body = {"model": model, "prompt": "abc", "max_tokens": 8, "temperature": 0}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def picture(self, **fields: Any) -> str:
        body = {"model_type": "diffusion", "model_name": "flux", "prompt": "a cat", **TINY}
        answer = self.client.post("/flux/predict", json=body | fields)
        assert answer.status_code == 200, answer.text
        (image,) = answer.json()["metadata"]["serving"]["images"]
        digest: str = image["pixel_digest"]
        return digest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user-data"))
    for name in ("LORAMUX_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def scene(folder: Path, home: None) -> Iterator[Scene]:
    models = [text_spec(folder, "a"), image_spec(folder)]
    with ModelServer(models=models, host="127.0.0.1", port=0) as server:
        found = Scene(server)
        with found.client:
            yield found


def servers() -> dict[int, str]:
    """Return the servers of this process by their ids, with the flags that they have."""
    children = psutil.Process().children()
    lines = {one.pid: " ".join(one.cmdline()) for one in children}
    return {pid: line for pid, line in lines.items() if "loramux.cli.main" in line}


@pytest.mark.slow
def test_two_models_answer_change_and_end(folder: Path, scene: Scene) -> None:
    server = scene.server
    listed = [one["id"] for one in scene.client.get("/v1/models").json()["data"]]
    assert listed == ["chat", "a", "flux", "ink", "night"]
    assert scene.client.get("/health").json()["models"] == {"chat": "ready", "flux": "ready"}
    base, a = scene.tokens("chat"), scene.tokens("a")
    assert base != a
    ink, plain = scene.picture(adapters=["ink"]), scene.picture()
    assert ink != plain
    before = set(servers())
    assert len(before) == 2

    # Adapters of text change in place; a broken one changes nothing.
    server.update(text_spec(folder, "a", "b"))
    assert len({base, a, scene.tokens("b")}) == 3
    with pytest.raises(ReplicaFailed, match="missing"):
        server.update(text_spec(folder, "b", "missing"))
    assert scene.tokens("a") == a
    assert set(servers()) == before

    # Images: a process with the new adapters takes over; the old one ends.
    server.update(image_spec(folder, default="ink"))
    assert scene.picture() == scene.picture(adapters=[]) == ink
    after = set(servers())
    assert len(after) == 2 and len(after & before) == 1
    body = {"model": "flux", "prompt": "a cat", "size": "64x64", "steps": 2, "seed": 1}
    drawn = scene.client.post("/v1/images/generations", json=body | {"adapters": []}).json()
    assert drawn["serving"]["images"][0]["pixel_digest"] == plain

    # A model that cannot be loaded leaves the old one.
    broken = replace(image_spec(folder), backend_kwargs={"model_id": str(folder / "a")})
    with pytest.raises(ReplicaFailed, match="model_index.json"):
        server.update(broken)
    assert scene.picture() == ink
    with pytest.raises(InvalidRequest, match="No deployment named 'fluks'. Did you mean flux"):
        server.update(replace(image_spec(folder), name="fluks"))
    server.shutdown()
    assert servers() == {}
    with pytest.raises(httpx2.ConnectError):
        scene.client.get("/health")


@pytest.mark.slow
def test_a_process_that_ends_is_started_again(folder: Path, home: None) -> None:
    with ModelServer([text_spec(folder, "a")], port=0) as server:
        scene = Scene(server)
        (old,) = psutil.Process().children()
        old.kill()
        old.wait()
        body = {"model": "a", "prompt": "abc", "max_tokens": 2}
        while (answer := scene.client.post("/v1/completions", json=body)).status_code != 200:
            assert answer.status_code in (502, 503)
            time.sleep(0.2)
        scene.client.close()
        (new,) = servers()
        assert new != old.pid


@pytest.mark.slow
def test_a_start_that_fails_leaves_nothing(folder: Path, home: None) -> None:
    server = ModelServer([text_spec(folder, "missing")], port=0)
    with pytest.raises(ReplicaFailed, match="missing"):
        server.run()
    assert servers() == {}
    server.shutdown()


@pytest.mark.slow
def test_other_machines_are_refused_without_a_key(
    folder: Path, home: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="needs no key"):
        ModelServer([text_spec(folder)], host="0.0.0.0", port=0).run()
    assert servers() == {}
    monkeypatch.setenv("LORAMUX_API_KEY", "secret-secret-secret")
    with ModelServer([text_spec(folder)], host="0.0.0.0", port=0) as server:
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401


def test_names_of_models_differ(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="must differ"):
        ModelServer(models=[text_spec(folder), text_spec(folder)])
    with pytest.raises(InvalidRequest, match="one spec or more"):
        ModelServer(models=[])
