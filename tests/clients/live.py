"""A server that serves the default model and the demo adapters, in its own environment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
BASE = "SmolLM2-135M-Instruct"
ADAPTERS = ("pirate", "shout", "json", "sentiment")
IMAGE_BASE = "flux"
IMAGE_ADAPTERS = ("ink", "night")
# Two of equal rank, for the ways to combine adapters that ask for it.
RANDOM_ADAPTERS = ("random-1", "random-2")
LISTENING = re.compile(r"listening on (http://[\d.:]+)", re.IGNORECASE)
QUESTION = "What is the capital of Italy?"
ANSWER_OF_SHOUT = "HEY! The capital of Italy is Rome!!!"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class Live:
    url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)

    def completion(self, prompt: str, model: str = BASE, max_tokens: int = 8, **more: Any) -> str:
        """Return the greedy text of the server's own route, which clients' answers are compared
        with.
        """
        asked = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        text: str = self.post("/v1/completions", **asked | more)["choices"][0]["text"]
        return text

    def generated_tokens(self, name: str) -> float:
        """How many tokens the server has generated with an adapter."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            metrics = reply.read().decode()
        found = re.search(
            rf'^loramux:adapter_generation_tokens_total\{{adapter="{name}",.*\}} (\S+)',
            metrics,
            re.M,
        )
        return float(found[1]) if found else 0


def server_python() -> str:
    """Return the interpreter of the environment that has loramux."""
    return os.environ.get("LORAMUX_PYTHON", str(REPOSITORY / ".venv" / "bin" / "python"))


@contextmanager
def live_server(folder: Path) -> Iterator[Live]:
    python = server_python()
    environment = server_environment(folder)
    modules = [f"{name}={EXAMPLES / 'adapters' / name}" for name in ADAPTERS]
    for seed, name in enumerate(RANDOM_ADAPTERS):
        make = [python, EXAMPLES / "make_adapter.py", folder / name, "--seed", str(seed)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, env=environment)
        modules.append(f"{name}={folder / name}")
    flags = ["--port", "0", "--served-model-name", BASE, "--pooling", "mean"]
    flags += ["--device-memory", "1GiB", "--allow-runtime-lora-updating"]
    with running(folder, [*flags, "--lora-modules", *modules]) as started:
        yield started


@contextmanager
def image_server(folder: Path, *flags: str, name: str = IMAGE_BASE) -> Iterator[Live]:
    """Yield a server of a tiny image model with random weights, with adapters in the flags.

    `{folder}` in a flag stands for the folder with the files of its adapters.
    """
    make = [server_python(), EXAMPLES / "images" / "make_tiny_model.py", folder]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, env=server_environment(folder))
    given = [flag.format(folder=folder) for flag in flags]
    first = ["--port", "0", "--image-model", str(folder / "model"), "--served-model-name", name]
    with running(folder, [*first, *given]) as started:
        yield started


def server_environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        "XDG_DATA_HOME": str(folder / "user-data"),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
    }


@contextmanager
def running(folder: Path, flags: list[str]) -> Iterator[Live]:
    environment = server_environment(folder)
    log = folder / "server.log"
    command = [server_python(), "-m", "loramux.cli.main", "serve", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield Live(_wait_for_url(process, log))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline and process.poll() is None:
        if found := LISTENING.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')}")
