"""loramux on Modal: `loramux serve` in containers that Modal starts, scales and routes to.

Put the adapters into the volume, and a key into a secret, then deploy (modal 1.6, an account):

    modal volume put loramux ./adapters /adapters
    modal secret create loramux LORAMUX_API_KEY=...
    python -m build
    LORAMUX_MODEL=meta-llama/Llama-3.1-8B-Instruct modal deploy deploy/modal_app.py

Modal hashes the header Modal-Session-ID, best effort: clients that send the adapter's name in it
meet in the same container, which then has the adapter. That is neither residency nor does it spill
when an adapter is busy; for that, use `loramux router` in front of servers with addresses.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import modal

PORT = 8000
# Open streams have DRAIN_S to end, before Modal ends the container.
DRAIN_S, EXIT_S = 60, 75
START_S = 900
MODEL = os.environ.get("LORAMUX_MODEL", "")
GPU = os.environ.get("LORAMUX_GPU", "L40S")
DATA = Path("/data")


CHECKOUT = Path(__file__).resolve().parents[1]


def find_wheel(checkout: Path = CHECKOUT) -> Path:
    """Return the file of LORAMUX_WHEEL, else the newest wheel in dist/."""
    given = os.environ.get("LORAMUX_WHEEL")
    if given:
        return Path(given)
    built = sorted(checkout.glob("dist/loramux-*.whl"), key=lambda file: file.stat().st_mtime)
    if built:
        return built[-1]
    if modal.is_local():
        raise SystemExit("There is no wheel in dist/: run `python -m build`, or set LORAMUX_WHEEL.")
    # In the container, where the image is built already.
    return Path("loramux.whl")


WHEEL = find_wheel()
image = (
    modal.Image.debian_slim(python_version="3.12")
    # Triton compiles the launchers of its kernels with gcc.
    .apt_install("gcc", "libc6-dev")
    .pip_install("torch==2.13.0")
    # A wheel that `python -m build` or a release has made; by default that of this checkout.
    .add_local_file(str(WHEEL), f"/root/{WHEEL.name}", copy=True)
    .run_commands(f"pip install '/root/{WHEEL.name}[gpu,postgres,s3]'")
    .env(
        {
            "LORAMUX_MODEL": MODEL,
            # Compiled kernels and downloaded models outlive the container.
            "LORAMUX_CACHE": f"{DATA}/cache/loramux",
            "HF_HOME": f"{DATA}/cache/huggingface",
            "TRITON_CACHE_DIR": f"{DATA}/cache/triton",
        }
    )
)
app = modal.App("loramux", image=image)
volume = modal.Volume.from_name("loramux", create_if_missing=True)
secret = modal.Secret.from_name("loramux", required_keys=["LORAMUX_API_KEY"])


def flags(*, data: Path = DATA, model: str = MODEL, host: str = "0.0.0.0") -> list[str]:
    """Return the flags of the server: all adapters of the volume by the names of their folders."""
    given = ["--host", host, "--port", str(PORT), "--drain-s", str(DRAIN_S)]
    # A database in a volume would be shared by containers that cannot lock it.
    given += ["--registry", os.environ.get("LORAMUX_REGISTRY", "none"), "--pool-id", "modal"]
    if model:
        given += ["--model", model]
    found = sorted(path.parent for path in data.glob("adapters/*/adapter_config.json"))
    modules = [f"{folder.name}={folder}" for folder in found]
    return [*given, *(["--lora-modules", *modules] if modules else [])]


def start(
    given: Sequence[str], *, program: Sequence[str] = ("loramux",), port: int = PORT
) -> subprocess.Popen[bytes]:
    """Return once the server accepts requests: Modal then takes the container for ready."""
    process = subprocess.Popen([*program, "serve", *given])
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return process
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    process.kill()
    raise RuntimeError(f"loramux did not start; its exit status is {process.wait()}")


def stop(process: subprocess.Popen[bytes]) -> int:
    """End the server: new requests get 503, open streams have DRAIN_S to end."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout=EXIT_S - 5)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@app.server(
    port=PORT,
    gpu=GPU,
    volumes={str(DATA): volume},
    secrets=[secret],
    min_containers=0,
    max_containers=4,
    scaledown_window=300,
    # Requests of different adapters run in one batch.
    target_concurrency=64,
    startup_timeout=START_S,
    exit_grace_period=EXIT_S,
    # The server itself asks for a key.
    unauthenticated=True,
)
class Server:
    @modal.enter()
    def enter(self) -> None:
        self.process = start(flags())

    @modal.exit()
    def exit(self) -> None:
        stop(self.process)
