"""Runs every code block of the documents against a server, and compares tables with the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loramux.config.fields import Kind, flag
from loramux.config.file import load_serve_config
from loramux.config.serve import SETTINGS
from loramux.server.errors import HTTP_STATUS
from loramux.server.families.table import FAMILIES, OWN
from tests.hub_server import HubRepository, HubServer
from tests.serve_factory import NOTHING, RunningServer, running_server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
HTTP_API, METRICS, CLI = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("http-api", "metrics", "cli")
)
FENCED = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
# Below the limit of a test, so that its failure says which command was slow.
LIMIT_S = 280
DOCUMENTED_URL = "http://127.0.0.1:8000"
ADAPTERS = ("json", "pirate", "sentiment", "shout")
# What a reader types into `loramux chat`.
CONVERSATION = "/max 16\nWhat is the capital of France?\n/adapter shout\nAnd of Italy?\n"

# Adapters that the documents name on the hub, and what stands for them here.
HUB_ADAPTERS = {"acme/sql-lora": "pirate", "acme/support-lora": "json"}
# `make` shows what it would do; pip knows the extras of `.[extra]`; curl fails on an error status;
# chat and top find the test's server, push the test's hub; serve reads its flags and its file, and
# then finds that the port is taken.
SHELL = """
set -euo pipefail
make() {{ command make -n "$@" >/dev/null; }}
pip() {{ [[ $1 == install && ",{extras}," == *",${{2:2:-1}},"* ]]; }}
curl() {{ command curl -sS --fail-with-body --max-time {limit_s} "$@"; echo; }}
python() {{ {python} "$@"; }}
loramux() {{
    case $1 in
        chat|top) python -m loramux.cli.main "$@" --url {url} ;;
        serve) said=$(python -m loramux.cli.main "$@" --port {port} 2>&1 || true)
            [[ $said == *"Cannot listen on"* ]] || {{ echo "$said"; return 1; }} ;;
        *) python -m loramux.cli.main "$@" ;;
    esac
}}
"""


@dataclass(frozen=True)
class Block:
    place: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for document in DOCUMENTS:
        text = document.read_text()
        for found in FENCED.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield Block(f"{document.name}:{line}", found[1], found[2])


BLOCKS = list(blocks())


def each(language: str) -> pytest.MarkDecorator:
    """Blocks of the README run in every test run, those of docs/ in `make test-all`."""
    chosen = [
        pytest.param(
            block,
            id=block.place,
            marks=() if block.place.startswith("README.md") else pytest.mark.slow,
        )
        for block in BLOCKS
        if block.language == language
    ]
    return pytest.mark.parametrize("block", chosen)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the reader's view of the repository, where a block may write files."""
    folder = tmp_path_factory.mktemp("checkout")
    for entry in ROOT.iterdir():
        (folder / entry.name).symlink_to(entry)
    for block in BLOCKS:
        if block.language == "toml":
            (folder / "serve.toml").write_text(block.text)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """As `make serve` starts it, on a free port."""
    modules = [f"{name}={ROOT / 'examples' / 'adapters' / name}" for name in ADAPTERS]
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["--device-memory", "512MiB", "--lora-modules", *modules]
    with running_server(log, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the environment of a user who has a hub with the adapters of the documents."""
    with HubServer() as server:
        for repository, name in HUB_ADAPTERS.items():
            files = (ROOT / "examples" / "adapters" / name).iterdir()
            contents = {file.name: file.read_bytes() for file in files}
            server.repositories[repository] = HubRepository({"main": contents})
        yield {
            "HF_ENDPOINT": server.url,
            "HF_HUB_OFFLINE": "0",
            "XDG_DATA_HOME": str(tmp_path_factory.mktemp("user-data")),
        }


def run(
    command: list[str], folder: Path, *, typed: str = "", environment: Mapping[str, str] = NOTHING
) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        input=typed,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    return result.stdout


def test_every_block_is_of_a_kind_that_is_checked_here() -> None:
    kinds = {"sh", "python", "json", "toml"}
    # A picture or a transcript.
    kinds.add("text")
    assert [block.place for block in BLOCKS if block.language not in kinds] == []


@each("sh")
def test_a_shell_block_runs(
    block: Block, server: RunningServer, checkout: Path, hub: dict[str, str]
) -> None:
    port = server.url.rpartition(":")[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    preamble = SHELL.format(
        python=shlex.quote(sys.executable),
        url=server.url,
        port=port,
        limit_s=LIMIT_S,
        extras=",".join(project["optional-dependencies"]),
    )
    script = block.text.replace(".venv/bin/", "").replace(DOCUMENTED_URL, server.url)
    run(["bash", "-c", preamble + script], checkout, typed=CONVERSATION, environment=hub)


@each("python")
def test_a_program_runs(block: Block, server: RunningServer, checkout: Path) -> None:
    program = block.text.replace(DOCUMENTED_URL, server.url)
    assert run([sys.executable, "-c", program], checkout).strip()


@each("toml")
def test_a_config_file_is_accepted(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(block.text)
    assert load_serve_config({}, file).lora_modules


@each("json")
def test_a_json_block_is_a_body_that_the_server_takes(block: Block, server: RunningServer) -> None:
    body = json.loads(block.text)
    if "messages" in body:
        response = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=LIMIT_S)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", ["chat_openai", "stream_client"])
def test_an_example_runs_against_the_server(
    name: str, server: RunningServer, checkout: Path
) -> None:
    printed = run([sys.executable, f"examples/{name}.py", server.url], checkout)
    assert "shout:" in printed and "pirate:" in printed


@pytest.mark.slow
def test_the_example_of_a_mixed_batch_answers_for_all(checkout: Path) -> None:
    printed = run([sys.executable, "examples/mixed_batch.py"], checkout)
    answers = dict(line.strip().split(": ", 1) for line in printed.splitlines() if ": " in line)
    assert {"base", *ADAPTERS} <= set(answers)


def test_the_curls_of_the_readme_answer_differently_and_rightly_for_every_model(
    server: RunningServer,
) -> None:
    commands = next(block.text for block in BLOCKS if "curl http" in block.text)
    bodies: list[dict[str, Any]] = [
        json.loads(body) for body in re.findall(r"-d '(.*?)'", commands, re.DOTALL)
    ]
    question, base, review = bodies[0], bodies[1]["model"], bodies[2]
    assert question["model"] in ADAPTERS and review["model"] == "sentiment"

    def ask(model: str) -> str:
        body = review if model == "sentiment" else {**question, "model": model}
        response = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=LIMIT_S)
        text: str = response.json()["choices"][0]["message"]["content"]
        return text

    models = (base, *ADAPTERS)
    with ThreadPoolExecutor(len(models)) as pool:
        answers = dict(zip(models, pool.map(ask, models), strict=True))
    assert len(set(answers.values())) == len(answers), answers
    assert answers.pop("sentiment") == "negative"
    assert all("Paris" in answer for answer in answers.values()), answers


def test_the_documented_error_is_the_one_that_the_server_sends(server: RunningServer) -> None:
    documented = next(json.loads(b.text) for b in BLOCKS if b.text.startswith('{\n  "error"'))
    body = {"model": "parrot", "prompt": "Ahoy"}
    response = httpx2.post(f"{server.url}/v1/completions", json=body)
    assert response.json() == documented
    assert response.status_code == documented["error"]["code"]


def test_the_documented_health_has_the_fields_of_a_deep_check(server: RunningServer) -> None:
    documented = next(json.loads(b.text) for b in BLOCKS if b.text.startswith('{"status"'))
    found = httpx2.get(f"{server.url}/health?deep=1", timeout=LIMIT_S).json()
    assert set(found) == set(documented)
    assert set(found["checks"]) == set(documented["checks"])


def test_every_route_stands_in_its_table(server: RunningServer) -> None:
    paths = httpx2.get(f"{server.url}/openapi.json").json()["paths"]
    served = {
        f"{method.upper()} {path}"
        for path, ways in paths.items()
        for method, way in ways.items()
        # Those of other servers' APIs have a page of their own.
        if not {*FAMILIES, OWN} & set(way["tags"])
    }
    assert (
        set(re.findall(r"^\| `((?:GET|POST|DELETE) [^`]+)` \|", HTTP_API, re.MULTILINE)) == served
    )


def test_every_metric_stands_in_its_table(server: RunningServer) -> None:
    scraped = httpx2.get(f"{server.url}/metrics").text
    names = set(re.findall(r"^# TYPE (\S+) ", scraped, re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}
    # Those of an image model are compared in tests/unit/server/test_two_models.py.
    of_text = re.sub(r"## Images\n.*?(?=## Gateways)", "", METRICS, flags=re.DOTALL)
    assert set(re.findall(r"`((?:vllm|loramux):\w+)`", of_text)) == names


def test_every_setting_stands_in_its_table_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*?) \|", CLI, re.MULTILINE))
    assert list(rows) == [flag(name) for name in SETTINGS]
    for name, setting in SETTINGS.items():
        # Sizes and absent values are told in words.
        if setting.default not in (None, (), False) and setting.kind is not Kind.SIZE:
            assert rows[flag(name)] == f"{setting.default}".removesuffix(".0")


def test_every_status_stands_in_its_table() -> None:
    rows = {int(status) for status in re.findall(r"^\| (\d{3}) \|", HTTP_API, re.MULTILINE)}
    # Starlette's own, for a known path.
    assert rows == {*HTTP_STATUS.values(), 405}
