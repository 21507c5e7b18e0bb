"""`loramux serve`: settings from flags and a file, then the server until it is told to stop."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from typer.core import TyperCommand

from loramux.cli.serve_view import ServeView, show_error
from loramux.config.fields import Kind, Setting, flag
from loramux.config.file import load_serve_config
from loramux.config.serve import SETTINGS, ServeConfig
from loramux.errors import InvalidRequest, LoramuxError

# As a shell reports a process that died of the signal.
STOPPED_BY_CTRL_C, STOPPED_BY_SIGTERM = 130, 143
FLAG_TYPES: dict[Kind, Any] = {
    Kind.COUNT: int,
    Kind.SECONDS: float,
    Kind.SWITCH: bool,
    Kind.TEXTS: list[str],
    Kind.PATHS: list[str],
    Kind.LORA_MODULES: list[str],
    Kind.SHARES: list[str],
    Kind.FRACTION: float,
}
LIST_FLAGS = {
    flag(name)
    for found in SETTINGS.values()
    if FLAG_TYPES.get(found.kind) == list[str]
    for name in (found.name, *found.aliases)
}


class Launch(Protocol):
    """Prepares the model, calls on_ready when requests are taken, returns the exit status."""

    def __call__(
        self,
        config: ServeConfig,
        *,
        progress: Callable[[str, float], None],
        on_ready: Callable[[str, int, str, Sequence[str]], None],
    ) -> int: ...


class ServeCommand(TyperCommand):
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, one_value_per_flag(args))


def one_value_per_flag(args: Sequence[str]) -> list[str]:
    """--lora-modules a=x b=y -> --lora-modules a=x --lora-modules b=y"""
    expanded: list[str] = []
    list_flag: str | None = None
    num_values = 0
    for arg in args:
        if arg.startswith("-"):
            list_flag, num_values = (arg if arg in LIST_FLAGS else None), 0
        elif list_flag is not None:
            expanded += [list_flag] if num_values else []
            num_values += 1
        expanded.append(arg)
    return expanded


def serve(config: Path | None = None, **flags: Any) -> None:
    """Serve a base model and its LoRA adapters over an OpenAI-style HTTP API.

    Requests choose an adapter by its name in `model`; all adapters share one batch.

    [bold]Examples[/bold]

    loramux serve

    loramux serve --model ./Qwen3-0.6B --lora-modules sql=./sql-lora support=./support-lora

    loramux serve --config serve.toml --port 9000

    Every option may stand in the TOML file (port = 9000, lora-modules = ["sql=./sql-lora"]); a
    flag replaces the file's value, and relative paths in the file start at its folder.

    Ctrl-C or SIGTERM: running requests get --drain-s seconds to end. Exit status 0 after a clean
    stop, 1 if the server could not start or failed, 2 for a wrong setting.
    """
    console = Console()
    try:
        given = {name: value for name, value in flags.items() if value is not None}
        settings = load_serve_config(given, config)
    except InvalidRequest as error:
        show_error(Console(stderr=True), str(error))
        raise typer.Exit(2) from error
    raise typer.Exit(run(settings, console, import_launch))


def flag_parameter(
    setting: Setting, *, panel: str | None = None, alias: str | None = None
) -> inspect.Parameter:
    """The parameter that typer turns into the setting's option; None means not given.

    An alias is a hidden option under a former name of the setting.
    """
    kind = FLAG_TYPES.get(setting.kind, str)
    has_default = setting.default not in (None, (), False) and setting.kind is not Kind.SIZE
    default = f" Default: {setting.default}." if has_default else ""
    option = typer.Option(
        help=setting.help + default,
        metavar=setting.metavar,
        rich_help_panel=panel or setting.group,
        show_default=False,
        hidden=alias is not None,
    )
    return inspect.Parameter(
        alias or setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def serve_signature() -> inspect.Signature:
    option = typer.Option(help="TOML file with any of these options.", metavar="FILE")
    file = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, option],
    )
    former = [
        flag_parameter(found, alias=alias) for found in SETTINGS.values() for alias in found.aliases
    ]
    return inspect.Signature([file, *map(flag_parameter, SETTINGS.values()), *former])


vars(serve)["__signature__"] = serve_signature()


def import_launch() -> Launch:
    # Imported late, because torch takes seconds that `--help` and a wrong flag should not.
    from loramux import launch

    return launch.serve


def run(config: ServeConfig, console: Console, find_launch: Callable[[], Launch]) -> int:
    signal.signal(signal.SIGTERM, stop)
    with ServeView(console) as view:
        view.show_plan(config)
        try:
            view.progress("Starting", 0.0)
            launch = find_launch()
            return launch(config, progress=view.progress, on_ready=view.show_ready)
        except KeyboardInterrupt:
            return 0 if view.is_ready else STOPPED_BY_CTRL_C
        except Stopped:
            return 0 if view.is_ready else STOPPED_BY_SIGTERM
        except (LoramuxError, OSError) as error:
            view.stop_progress()
            show_error(Console(stderr=True), str(error))
            return 1


class Stopped(SystemExit):
    """SIGTERM, as an exception: what was begun is unwound. asyncio lets a SystemExit pass."""


def stop(signal_number: int, frame: object) -> None:
    """While the model is prepared. uvicorn has its own, and calls this one after the drain."""
    raise Stopped(STOPPED_BY_SIGTERM)
