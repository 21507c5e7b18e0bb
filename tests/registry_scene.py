"""A tiny model, adapters for it, and real servers that serve them from a registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from loramux.store.store import ContentStore
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.serve_factory import NOTHING, RunningServer, running_server

BASE = "base"


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_model_with_tokenizer(folder / "model")
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        self.data = folder / "data"
        self._cids = ContentStore(folder / "cids")

    def make_adapter(self, name: str, *, seed: int, rank: int = 4) -> str:
        """Make an adapter in adapters/name and return its CID."""
        folder = write_adapter(
            self.adapters / name,
            lora_config_dict(r=rank, lora_alpha=64, base_model_name_or_path="model"),
            lora_tensors(self.model.config, seed=seed, r=rank),
        )
        return self._cids.put_folder(folder)

    @contextmanager
    def serving(
        self, name: str, *flags: str, environment: Mapping[str, str] = NOTHING
    ) -> Iterator[RunningServer]:
        settings = ["--model", str(self.folder / "model"), "--served-model-name", BASE]
        settings += ["--dtype", "float32", "--device-memory", "16MiB", "--prewarm", "0"]
        settings += ["--data", str(self.data), "--allowed-roots", str(self.adapters)]
        settings += ["--disk-folder", str(self.folder / f"images-{name}"), "--pool-id", name]
        log = self.folder / f"{name}.log"
        with running_server(log, *settings, *flags, environment=environment) as server:
            yield server


def client_of(server: RunningServer) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, timeout=120)


def send(client: httpx2.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def push(client: httpx2.Client, reference: str, source: str) -> str:
    """Return the CID that the server reports."""
    return str(send(client, "/v1/adapters", {"reference": reference, "source": source})["cid"])


def ask(client: httpx2.Client, model: str, *, max_tokens: int = 2) -> dict[str, Any]:
    """Return the receipt."""
    body = {"model": model, "prompt": "The quick", "max_tokens": max_tokens, "temperature": 0}
    serving: dict[str, Any] = send(client, "/v1/completions", body)["serving"]
    return serving
