from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys

import pytest
from rich.console import Console

from loramux.cli.console import show_error
from loramux.cli.serve import ServeView, curl_command, server_url
from loramux.config.fields import LoraModule
from loramux.config.serve import ServeConfig


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=40, force_terminal=terminal), file


def test_the_first_screen_names_models_and_a_command_on_one_line() -> None:
    screen, file = console()
    with ServeView(screen) as view:
        view.show_plan(ServeConfig(lora_modules=(LoraModule("pirate", "/p"),)))
        view.progress("Converting the model", 0.1)
        view.progress("Converting the model", 0.9)
        view.show_ready("0.0.0.0", 8000, "smol", ["pirate", "upper"])
    lines = file.getvalue().splitlines()
    assert lines.count("Converting the model …") == 1
    assert "Listening on http://127.0.0.1:8000" in lines
    assert [line.split()[-1] for line in lines if line.endswith(("smol", "upper"))] == [
        "smol",
        "upper",
    ]
    assert curl_command("http://127.0.0.1:8000", "pirate") in lines


def test_a_terminal_sees_a_bar_that_moves_and_goes_away() -> None:
    screen, file = console(terminal=True)
    with ServeView(screen) as view:
        view.progress("Converting [the] model", 0.25)
        assert "Converting [the] model" in file.getvalue()
        view.progress("Checking adapters", 1.0)
        view.show_ready("127.0.0.1", 8000, "smol", [])
        before = file.getvalue()
        view.progress("Restarting", 0.5)
    assert "25%" in before
    assert "Restarting" not in file.getvalue(), "a bar would overwrite the log of a running server"


def test_a_thousand_adapters_do_not_fill_the_screen() -> None:
    screen, file = console()
    modules = tuple(LoraModule(f"a{index}", "/x") for index in range(1000))
    with ServeView(screen) as view:
        view.show_plan(ServeConfig(lora_modules=modules))
        view.show_ready("127.0.0.1", 8000, "smol", [module.name for module in modules])
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
