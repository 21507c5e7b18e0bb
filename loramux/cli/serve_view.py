"""What `loramux serve` shows: the plan, the preparation, and how to talk to the server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from loramux.cli.doctor_view import printable, say, size_text
from loramux.config.serve import ServeConfig

MAX_NAMES_SHOWN = 20
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class ServeView:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bars.add_task("", total=1.0)
        self._stage: str | None = None
        self.is_ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop_progress()

    def show_plan(self, config: ServeConfig) -> None:
        say(self._console, "Base      ", config.model or "the default model", style="bold")
        for module in config.lora_modules[:MAX_NAMES_SHOWN]:
            say(self._console, "Adapter   ", f"{module.name} from {module.path}", style="bold")
        hidden = len(config.lora_modules) - MAX_NAMES_SHOWN
        if hidden > 0:
            say(self._console, "          ", f"and {hidden} more adapters", style="bold")
        pool_bytes = config.engine.device_memory_bytes
        memory = size_text(pool_bytes) if pool_bytes else "chosen by itself"
        say(self._console, "Page pool ", memory, style="bold")

    def progress(self, stage: str, done: float) -> None:
        """`done` is in [0, 1]. Without a terminal, each stage is one line."""
        if self.is_ready:
            return
        self._bars.update(self._task, description=escape(printable(stage)), completed=done)
        if self._console.is_terminal:
            self._bars.start()
        elif stage != self._stage:
            self._console.print(Text(f"{printable(stage)} …"), soft_wrap=True)
        self._stage = stage

    def stop_progress(self) -> None:
        self._bars.stop()

    def show_ready(
        self, host: str, port: int, base_name: str, adapter_names: Sequence[str]
    ) -> None:
        self.is_ready = True
        self.stop_progress()
        url = server_url(host, port)
        say(self._console, "\nListening on ", url, style="bold green")
        say(self._console, "Models       ", base_name, style="bold")
        for name in adapter_names[:MAX_NAMES_SHOWN]:
            say(self._console, "             ", name, style="bold")
        hidden = len(adapter_names) - MAX_NAMES_SHOWN
        if hidden > 0:
            say(self._console, "             ", f"and {hidden} more: GET /v1/models", style="bold")
        say(self._console, "\nTry it, here or in another terminal:", "", style="bold")
        command = curl_command(url, adapter_names[0] if adapter_names else base_name)
        self._console.print(Text(command), soft_wrap=True)
        self._console.print(Text(f"loramux chat --url {url}\n"), soft_wrap=True)


def server_url(host: str, port: int) -> str:
    """An address to connect to, also where the server listens on all."""
    host = EVERYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def curl_command(url: str, model: str) -> str:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": messages, "temperature": 0, "max_tokens": 64})
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def show_error(console: Console, message: str) -> None:
    say(console, "error: ", message, style="bold red")
