"""What the benchmarks need beside the server: its tokenizer, and programs that run offline."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.live import REPOSITORY, server_python

TOKENIZER = """
from loramux.models.default_model import default_model_path
from loramux.models.gguf_file import converted_folder
print(converted_folder(default_model_path()))
"""
Run = Callable[..., None]


@pytest.fixture(scope="session")
def tokenizer() -> str:
    """Return the folder with the default model's tokenizer, for clients that count tokens
    themselves.
    """
    found = subprocess.run(
        [server_python(), "-c", TOKENIZER],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip().splitlines()[-1]


@pytest.fixture
def run_program(tmp_path: Path) -> Run:
    """Run a program of the environment, offline, in the root of the repository."""
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }

    def run(program: str, *arguments: str) -> None:
        command = [str(Path(sys.executable).parent / program), *arguments]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    return run
