"""A real server with keys: OpenAI's client, curl, the commands, and keys of a registry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest

from tests.engine_factory import save_model_with_tokenizer
from tests.serve_factory import RunningServer, running_server

pytestmark = pytest.mark.slow

KEY, OTHER = "first-key-of-the-flag", "second-key-of-the-flag"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6


@dataclass
class Keyed:
    server: RunningServer
    data: Path
    clients: ExitStack
    """Closes the clients at the end."""

    @property
    def url(self) -> str:
        return self.server.url

    def loramux(
        self, *words: str, key: str = "", typed: str = ""
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "LORAMUX_API_KEY": key, "COLUMNS": "200"}
        return subprocess.run(
            [sys.executable, "-m", "loramux.cli.main", *words],
            input=typed,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )

    def create(self, tenant: str, *flags: str) -> str:
        """Make a key of the registry, and return when the server knows it."""
        words = ("keys", "create", "--tenant", tenant, *flags, "--data", str(self.data))
        made = self.loramux(*words)
        assert made.returncode == 0, made.stderr
        key = made.stdout.strip()
        self.wait_for(200, key)
        return key

    def status(self, key: str, path: str = "/v1/models") -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx2.get(f"{self.url}{path}", headers=headers, timeout=30).status_code

    def wait_for(self, status: int, key: str) -> None:
        deadline = time.monotonic() + 30
        while self.status(key) != status:
            assert time.monotonic() < deadline, self.status(key)
            time.sleep(0.05)

    def client(self, key: str) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        return self.clients.enter_context(client)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    save_model_with_tokenizer(folder / "model")
    flags = ["--model", str(folder / "model"), "--served-model-name", "base", "--dtype", "float32"]
    flags += ["--device-memory", "16MiB", "--data", str(folder / "data")]
    # As vLLM's flag: several keys after one.
    flags += ["--api-key", KEY, OTHER, "--host", "0.0.0.0"]
    with running_server(folder / "log", *flags) as running, ExitStack() as clients:
        running.url = running.url.replace("0.0.0.0", "127.0.0.1")
        yield Keyed(running, folder / "data", clients)


def test_openais_client_and_curl_work_with_a_key_and_not_without(keyed: Keyed) -> None:
    for key in (KEY, OTHER):
        answer = keyed.client(key).completions.create(model="base", prompt="hi", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens == 2
    for key in ("EMPTY", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError) as refused:
            keyed.client(key).models.list()
        assert key not in str(refused.value)
    curl = ["curl", "-sS", f"{keyed.url}/v1/models", "-o", os.devnull, "-w", "%{http_code}"]
    asked = [["-H", f"Authorization: Bearer {KEY}"], ["-H", f"x-api-key: {KEY}"], []]
    codes = [subprocess.check_output([*curl, *headers], text=True) for headers in asked]
    assert codes == ["200", "200", "401"]
    assert keyed.status("", "/health") == 200


def test_commands_send_the_key_of_the_environment(keyed: Keyed) -> None:
    chat = keyed.loramux("chat", "--url", keyed.url, key=KEY, typed="/max 2\nhi\n")
    assert chat.returncode == 0, chat.stderr
    assert keyed.loramux("top", "--url", keyed.url, key=KEY).returncode == 0
    for command in ("chat", "top"):
        refused = keyed.loramux(command, "--url", keyed.url, typed="hi\n")
        assert refused.returncode != 0 and "API key" in refused.stderr + refused.stdout


def test_keys_of_the_registry_are_followed_while_the_server_runs(keyed: Keyed) -> None:
    key = keyed.create("acme", "--scope", "infer")
    assert [model.id for model in keyed.client(key).models.list()] == ["base"]
    with pytest.raises(openai.PermissionDeniedError):
        keyed.client(key).get("/stats", cast_to=object)
    keys = json.loads(keyed.loramux("keys", "list", "--json", "--data", str(keyed.data)).stdout)
    (found,) = [one for one in keys["keys"] if key.split("_")[1] == one["id"]]
    rotated = keyed.loramux("keys", "rotate", found["id"], "--data", str(keyed.data))
    new = rotated.stdout.strip()
    keyed.wait_for(200, new)
    keyed.wait_for(401, key)
    keyed.loramux("keys", "revoke", new.split("_")[1], "--data", str(keyed.data))
    keyed.wait_for(401, new)


def test_prefixes_are_reused_within_a_tenant_only(keyed: Keyed) -> None:
    def cached(key: str) -> int:
        body = {"model": "base", "prompt": PROMPT, "max_tokens": 2}
        usage = keyed.client(key).completions.create(**body).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    acme, second, globex = (keyed.create(name) for name in ("acme", "acme", "globex"))
    assert cached(acme) == 0
    # Of another key of the same tenant too.
    assert cached(second) > 0
    assert cached(globex) == 0 and cached(KEY) == 0


def test_no_key_is_in_the_log_or_in_the_data_folder(keyed: Keyed) -> None:
    key = keyed.create("acme")
    keyed.client(key).completions.create(model="base", prompt="hi", max_tokens=2)
    with pytest.raises(openai.NotFoundError):
        keyed.client(key).completions.create(model="globex/absent", prompt="hi")
    time.sleep(0.5)  # Receipts are stored in batches.
    files = [keyed.server.log, *(path for path in keyed.data.rglob("*") if path.is_file())]
    for secret in (KEY, OTHER, key.split("_", 2)[2]):
        assert all(secret.encode() not in path.read_bytes() for path in files), secret
