"""`loramux serve` up to the launch, which is replaced by a fake."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from loramux.backend.text import ModelCard
from loramux.cli.console import show_error
from loramux.cli.main import app
from loramux.cli.serve import ServeView, Stopped, curl_command, one_value_per_flag, run, server_url
from loramux.config.engine import EngineConfig
from loramux.config.fields import LoraModule, flag
from loramux.config.serve import SETTINGS, ServeConfig
from loramux.errors import UnsupportedModel
from loramux.launch.serve import ReadyModel, ServerReady

Launched = list[ServeConfig]


@pytest.fixture(autouse=True)
def keep_signal_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def ready(*adapters: str, host: str = "127.0.0.1", **facts: Any) -> ServerReady:
    card = ModelCard(
        **{
            "name": "smol",
            "path": "",
            "digest": "",
            "max_model_len": 8,
            "vocab_size": 8,
            "dtype": "float32",
            "pool_bytes": 2**30,
            "num_pages": 512,
            "host_memory_bytes": 2**31,
            **facts,
        }
    )
    return ServerReady(
        host=host,
        port=8000,
        is_https=False,
        models=[ReadyModel(base_name="smol", adapter_names=adapters, card=card)],
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    configs: Launched = []

    def serve(
        config: ServeConfig, *, progress: Any, downloads: Any, on_ready: Any, worker: Any
    ) -> int:
        assert worker == "a spawned engine"
        configs.append(config)
        progress("Converting the model", 0.5)
        on_ready(ready(*(m.name for m in config.lora_modules)))
        return 0

    fake = ModuleType("loramux.launch.serve")
    vars(fake)["serve"] = serve
    monkeypatch.setitem(sys.modules, "loramux.launch.serve", fake)
    monkeypatch.setattr("loramux.launch.serve", fake, raising=False)
    monkeypatch.setattr("loramux.worker.spawn.spawn_worker", lambda: "a spawned engine")
    return configs


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, ["serve", *args])


def test_flags_become_the_config(launched: Launched) -> None:
    result = invoke(
        *("--model", "base.gguf", "--dtype", "float32", "--port", "9000", "--max-queue", "5"),
        *("--device-memory", "512MiB", "--strict-base", "--drain-s", "2.5"),
        *("--served-model-name", "x", "y"),
    )
    assert result.exit_code == 0, result.output
    assert launched == [
        ServeConfig(
            model="base.gguf",
            port=9000,
            max_queue=5,
            engine=EngineConfig(dtype="float32", device_memory_bytes=512 * 2**20, strict_base=True),
            drain_s=2.5,
            served_model_name=("x", "y"),
        )
    ]


def test_former_flags_of_shares_are_accepted(launched: Launched) -> None:
    result = invoke("--adapter-weights", "sql=2", "chat=3", "--tenant-weights", "acme=2")
    assert result.exit_code == 0, result.output
    assert launched[0].adapter_shares == (("sql", 2.0), ("chat", 3.0))
    assert launched[0].tenant_shares == (("acme", 2.0),)


LORA_FLAGS = {
    "several after one flag": ["--lora-modules", "a=/x", "b=/y", "--port", "1"],
    "the flag twice": ["--lora-modules", "a=/x", "--port", "1", "--lora-modules", "b=/y"],
    "with an equals sign": ["--lora-modules=a=/x", "--lora-modules=b=/y", "--port", "1"],
    "JSON": ["--port", "1", "--lora-modules", '{"name": "a", "path": "/x"}', "b=/y"],
}


@pytest.mark.parametrize("form", LORA_FLAGS)
def test_adapters_are_given_as_for_vllm(form: str, launched: Launched) -> None:
    result = invoke(*LORA_FLAGS[form])
    assert result.exit_code == 0, result.output
    assert launched[0].lora_modules == (LoraModule("a", "/x"), LoraModule("b", "/y"))
    assert launched[0].port == 1


def test_only_list_flags_swallow_what_follows() -> None:
    args = ["--lora-modules", "a=x", "b=y", "--port", "1", "stray"]
    expanded = ["--lora-modules", "a=x", "--lora-modules", "b=y", "--port", "1", "stray"]
    assert one_value_per_flag(args) == expanded
    assert one_value_per_flag(["--lora-modules"]) == ["--lora-modules"]


def test_a_stray_word_and_an_unknown_flag_are_refused(launched: Launched) -> None:
    assert invoke("--port", "1", "stray").exit_code == 2
    assert invoke("--prot", "1").exit_code == 2
    assert invoke("--port", "many").exit_code == 2
    assert not launched


def test_the_file_counts_and_a_flag_replaces_it(launched: Launched, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nhost = "0.0.0.0"\nstrict-base = true\nlora-modules = ["a=x"]\n')
    result = invoke("--config", str(file), "--port", "2", "--no-strict-base")
    assert result.exit_code == 0, result.output
    [config] = launched
    assert (config.port, config.host, config.engine.strict_base) == (2, "0.0.0.0", False)
    assert config.lora_modules == (LoraModule("a", str(tmp_path / "x")),)


def test_a_wrong_setting_ends_before_anything_is_loaded(launched: Launched, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("prot = 1")
    result = invoke("--config", str(file))
    assert result.exit_code == 2
    assert "Did you mean port" in result.stderr
    assert "Traceback" not in result.output
    assert invoke("--lora-modules", "pirate").exit_code == 2
    assert not launched


def test_help_names_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = re.sub(r"\x1b\[[0-9;]*m", "", invoke("--help").output)
    for name in SETTINGS:
        assert flag(name) in text
    assert "weights NAME=NUMBER" not in text, "former names are hidden"
    assert "Default: 8000." in text
    assert "--lora-modules sql=./sql-lora support=./support-lora" in text


def raising(error: BaseException, *, after_ready: bool = False) -> Callable[..., int]:
    def launch(config: ServeConfig, *, progress: Any, downloads: Any, on_ready: Any) -> int:
        if after_ready:
            on_ready(ready())
        raise error

    return launch


@pytest.mark.parametrize(
    ("launch", "status"),
    [
        (raising(UnsupportedModel("no such model")), 1),
        (raising(PermissionError("not yours")), 1),
        (raising(KeyboardInterrupt()), 130),
        (raising(KeyboardInterrupt(), after_ready=True), 0),
        (raising(Stopped(143)), 143),
        (raising(Stopped(143), after_ready=True), 0),
    ],
)
def test_the_exit_status_depends_on_the_end(launch: Callable[..., int], status: int) -> None:
    console = Console(file=io.StringIO())
    assert run(ServeConfig(), console, lambda: launch) == status


def test_sigterm_while_the_model_is_prepared_unwinds() -> None:
    unwound: list[str] = []

    def launch(config: ServeConfig, *, progress: Any, downloads: Any, on_ready: Any) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            unwound.append("yes")
        return 0

    assert run(ServeConfig(), Console(file=io.StringIO()), lambda: launch) == 143
    assert unwound == ["yes"]


def make_names(makefile_folder: Path) -> Sequence[str]:
    result = subprocess.run(
        ["make", "--no-print-directory", "-n", "serve", "ARGS=--port 9"],
        cwd=makefile_folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return re.findall(r"(\S+)=\S*adapters/", result.stdout)


def test_make_serve_finds_the_demo_adapters(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    (tmp_path / "Makefile").write_text((root / "Makefile").read_text())
    for path in re.findall(r"^INPUTS := (.*)$", (tmp_path / "Makefile").read_text(), re.M)[
        0
    ].split():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    for name in ("upper", "pirate"):
        (tmp_path / "examples/adapters" / name).mkdir(parents=True)
        (tmp_path / "examples/adapters" / name / "adapter_config.json").touch()
    (tmp_path / "examples/adapters/data").mkdir()
    assert sorted(make_names(tmp_path)) == ["pirate", "upper"]


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=40, force_terminal=terminal), file


def test_the_first_screen_names_models_and_a_command_on_one_line() -> None:
    screen, file = console()
    with ServeView(screen) as view:
        view.show_plan(ServeConfig(lora_modules=(LoraModule("pirate", "/p"),)))
        view.progress("Converting the model", 0.1)
        view.progress("Converting the model", 0.9)
        view.show_ready(ready("pirate", "upper", host="0.0.0.0"))
    lines = file.getvalue().splitlines()
    assert lines.count("Converting the model …") == 1
    assert "Listening on http://127.0.0.1:8000" in lines
    assert [line.split()[-1] for line in lines if line.endswith(("smol", "upper"))] == [
        "smol",
        "upper",
    ]
    assert curl_command("http://127.0.0.1:8000", "pirate") in lines


def test_the_first_screen_names_the_device_and_its_sizes() -> None:
    screen, file = console()
    gpu = {"device": "cuda:1", "gpu_name": "NVIDIA H200", "dtype": "bfloat16"}
    with ServeView(screen) as view:
        seconds = {"Loading weights": 3.21, "Compiling kernels": 12.0}
        view.show_ready(ready(**gpu, max_batch_tokens=2048, start_seconds=seconds))
    lines = file.getvalue().splitlines()
    assert "Device       NVIDIA H200 (cuda:1), bfloat16" in lines
    assert "Page pool    1 GiB, 512 pages of 2 MiB for KV cache (bfloat16) and adapters" in lines
    assert "Host memory  2 GiB for adapters" in lines
    assert "Batch        2048 tokens a step, 256 sequences" in lines
    assert "Engine start Loading weights 3.2 s, Compiling kernels 12.0 s" in lines
    assert "No GPU" not in file.getvalue()


def test_the_first_screen_says_why_a_gpu_is_not_used() -> None:
    screen, file = console()
    with ServeView(screen) as view:
        view.show_ready(ready(fallback_reason="torch is built without CUDA"))
    lines = file.getvalue().splitlines()
    assert "Device       CPU, float32" in lines
    assert "No GPU       torch is built without CUDA" in lines


def test_a_terminal_sees_a_bar_that_moves_and_goes_away() -> None:
    screen, file = console(terminal=True)
    with ServeView(screen) as view:
        view.progress("Converting [the] model", 0.25)
        assert "Converting [the] model" in file.getvalue()
        view.progress("Checking adapters", 1.0)
        view.show_ready(ready())
        before = file.getvalue()
        view.progress("Restarting", 0.5)
    assert "25%" in before
    assert "Restarting" not in file.getvalue(), "a bar would overwrite the log of a running server"


def test_a_download_has_one_bar_in_bytes() -> None:
    screen, file = console(terminal=True)
    screen.width = 120
    with ServeView(screen) as view:
        view.progress("Starting", 0.0)
        view.begin("Downloading acme/[base]", 4 * 2**30)
        view.add(2**30)
        view.progress("Loading weights", 0.5)
    assert "Downloading acme/[base]" in file.getvalue()
    assert "1.0/4.0 GiB" in file.getvalue()
    screen, file = console()
    with ServeView(screen) as view:
        view.begin("Downloading acme/base", 4 * 2**30)
        view.add(2**30)
    assert file.getvalue().strip() == "Downloading acme/base (4 GiB) …"


def test_an_interrupted_download_says_that_it_resumes() -> None:
    def launch(config: ServeConfig, *, progress: Any, downloads: Any, on_ready: Any) -> int:
        downloads.begin("Downloading acme/base", 100)
        raise KeyboardInterrupt

    screen, file = console()
    assert run(ServeConfig(), screen, lambda: launch) == 130
    assert "Stopped. The download resumes at the next start." in file.getvalue()


def test_a_thousand_adapters_do_not_fill_the_screen() -> None:
    screen, file = console()
    modules = tuple(LoraModule(f"a{index}", "/x") for index in range(1000))
    with ServeView(screen) as view:
        view.show_plan(ServeConfig(lora_modules=modules))
        view.show_ready(ready(*(module.name for module in modules)))
    assert len(file.getvalue().splitlines()) < 60
    assert file.getvalue().count("980 more") == 2


@pytest.mark.parametrize("model", ["pirate", 'o\'brien "x"', "$(touch /tmp/x)", "日本"])
def test_the_command_survives_a_shell(model: str) -> None:
    words = shlex.split(curl_command("http://h:1", model))
    assert json.loads(words[-1])["model"] == model
    echoed = subprocess.run(
        [
            "sh",
            "-c",
            curl_command("http://h:1", model).replace("curl", f"{sys.executable} -c 0", 1),
        ],
        capture_output=True,
    )
    assert echoed.returncode == 0


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("box.local", "http://box.local:80"),
    ],
)
def test_the_address_is_one_to_connect_to(host: str, url: str) -> None:
    assert server_url(host, 80) == url


def test_an_error_cannot_steer_the_terminal() -> None:
    screen, file = console()
    show_error(screen, "bad \x1b[2J name")
    assert "\x1b" not in file.getvalue()
    assert "error: bad" in file.getvalue()


def test_counts_may_be_auto(launched: Launched) -> None:
    result = invoke("--max-batch-tokens", "auto", "--max-sequences", "8", "--device", "auto")
    assert result.exit_code == 0, result.output
    assert launched == [ServeConfig(engine=EngineConfig(max_sequences=8))]
    assert invoke("--max-batch-tokens", "many").exit_code == 2
    assert invoke("--port", "auto").exit_code == 2
