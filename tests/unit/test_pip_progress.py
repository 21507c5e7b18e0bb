"""What an installation prints meanwhile: real pip and a slow index, without a terminal."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "slowpart-1.5-py3-none-any.whl"
NUM_BYTES = 6_000_000
NUM_PIECES = 12
PAUSE_S = 0.25


def make_wheel(path: Path) -> bytes:
    info = "slowpart-1.5.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("slowpart/data", os.urandom(NUM_BYTES))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: slowpart\nVersion: 1.5\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


@contextmanager
def slow_index(content: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.endswith(".whl"):
                digest = hashlib.sha256(content).hexdigest()
                self.answer(f'<a href="/{WHEEL}#sha256={digest}">{WHEEL}</a>'.encode(), "text/html")
                return
            self.head(len(content), "application/octet-stream")
            size = -(-len(content) // NUM_PIECES)
            for start in range(0, len(content), size):
                self.wfile.write(content[start : start + size])
                time.sleep(PAUSE_S)

        def answer(self, body: bytes, kind: str) -> None:
            self.head(len(body), kind)
            self.wfile.write(body)

        def head(self, size: int, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.send_header("Content-Type", kind)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()
        server.server_close()


def install(url: str, target: Path, name: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--no-cache-dir", "--no-deps", "--target", str(target), "--index-url", url, name]
    quiet = ["--disable-pip-version-check", "--root-user-action", "ignore"]
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/pip_progress.py"), *quiet, *arguments],
        env={**os.environ, "LORAMUX_PIP_INTERVAL_S": "0.5"},
        capture_output=True,
        text=True,
    )


def test_a_slow_download_is_named_with_its_size_and_goes_on_being_reported(tmp_path: Path) -> None:
    """Nothing was printed for minutes."""
    with slow_index(make_wheel(tmp_path / WHEEL)) as url:
        done = install(url, tmp_path / "out", "slowpart")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/slowpart/data").stat().st_size == NUM_BYTES
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "downloading slowpart-1.5 (6.0 MB)" in lines
    assert "unpacking 1 packages" in lines
    assert len([line for line in lines if re.match(r"downloading slowpart.* \d+ s$", line)]) >= 2


def test_a_failure_shows_what_pip_said(tmp_path: Path) -> None:
    with slow_index(b"no wheel") as url:
        done = install(url, tmp_path / "out", "slowpart==9.9")
    assert done.returncode != 0
    assert "slowpart==9.9" in done.stderr
