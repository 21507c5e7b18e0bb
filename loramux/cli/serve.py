"""`loramux serve`: read the settings and run the server until it is stopped."""

from __future__ import annotations

import inspect
import json
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from typer.core import TyperCommand

from loramux.backend.host import HostCard
from loramux.backend.images import ImageCard
from loramux.backend.text import ModelCard
from loramux.base.progress import ByteSink
from loramux.cli.console import ByteView, printable, say, show_error, size_text
from loramux.cli.vllm_flags import translate_vllm_flags
from loramux.config.fields import AUTO, Kind, Setting, flag
from loramux.config.file import load_serve_config
from loramux.config.images import with_demo
from loramux.config.serve import SETTINGS, ServeConfig
from loramux.errors import InvalidRequest, LoramuxError

if TYPE_CHECKING:
    from loramux.launch.serve import ReadyModel, ServerReady

MAX_NAMES_SHOWN = 20
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class ServeView:
    """Prints the settings, the progress of the start, and how to call the server."""

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
        self._download: ByteView | None = None
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
        if config.serves_text:
            say(self._console, "Base      ", config.model or "the default model", style="bold")
        if config.images.image_model is not None:
            say(self._console, "Images    ", config.images.image_model, style="bold")
        for lora in config.images.image_lora[:MAX_NAMES_SHOWN]:
            say(self._console, "Adapter   ", lora, style="bold")
        for module in config.lora_modules[:MAX_NAMES_SHOWN]:
            say(self._console, "Adapter   ", f"{module.name} from {module.path}", style="bold")
        hidden = len(config.lora_modules) - MAX_NAMES_SHOWN
        if hidden > 0:
            say(self._console, "          ", f"and {hidden} more adapters", style="bold")

    def progress(self, stage: str, done: float) -> None:
        """Show a stage and its progress in [0, 1]; without a terminal print one line per stage."""
        if self.is_ready:
            return
        self._end_download()
        self._bars.update(self._task, description=escape(printable(stage)), completed=done)
        if self._console.is_terminal:
            self._bars.start()
        elif stage != self._stage:
            self._console.print(Text(f"{printable(stage)} …"), soft_wrap=True)
        self._stage = stage

    def stop_progress(self) -> None:
        self._end_download()
        self._bars.stop()

    @property
    def is_downloading(self) -> bool:
        return self._download is not None

    def begin(self, what: str, total_bytes: int | None) -> None:
        """Show a bar in bytes until the next stage; without a terminal print a line now and then.

        With add() this is the ByteSink of the model's download.
        """
        self._end_download()
        size = "" if total_bytes is None else f" ({size_text(total_bytes)})"
        if self._console.is_terminal:
            self._bars.stop()
        else:
            self._console.print(Text(f"{printable(what)}{size} …"), soft_wrap=True)
        self._download = ByteView(self._console)
        self._download.__enter__()
        self._download.begin(what, total_bytes)

    def add(self, num_bytes: int) -> None:
        if self._download is not None:
            self._download.add(num_bytes)

    def _end_download(self) -> None:
        if self._download is not None:
            self._download.__exit__(None, None, None)
            self._download = None

    def show_stopped(self) -> None:
        """Say what an interruption of the start leaves behind."""
        if self.is_downloading:
            self.stop_progress()
            say(self._console, "Stopped. ", "The download resumes at the next start.", style="bold")

    def show_ready(self, ready: ServerReady) -> None:
        self.is_ready = True
        self.stop_progress()
        url = server_url(ready.host, ready.port, is_https=ready.is_https)
        for model in ready.models:
            for name, value in engine_facts(model.card):
                say(self._console, f"{name:<13}", value, style="bold")
            if model.card.fallback_reason is not None:
                reason = model.card.fallback_reason
                say(self._console, "No GPU       ", reason, style="bold yellow")
        say(self._console, "\nListening on ", url, style="bold green")
        for model in ready.models:
            is_text = isinstance(model.card, ModelCard)
            label = "Models       " if is_text else "Images       "
            say(self._console, label, model.base_name, style="bold")
            self._show_names(model.adapter_names)
        say(self._console, "\nTry it, here or in another terminal:", "", style="bold")
        for model in ready.models:
            self._console.print(Text(command_for(url, model)), soft_wrap=True)
        if any(isinstance(model.card, ModelCard) for model in ready.models):
            self._console.print(Text(f"loramux chat --url {url}\n"), soft_wrap=True)

    def _show_names(self, names: Sequence[str]) -> None:
        for name in names[:MAX_NAMES_SHOWN]:
            say(self._console, "             ", name, style="bold")
        hidden = len(names) - MAX_NAMES_SHOWN
        if hidden > 0:
            say(self._console, "             ", f"and {hidden} more: GET /v1/models", style="bold")


def command_for(url: str, model: ReadyModel) -> str:
    """Return a command that asks the model with its first adapter."""
    names = model.adapter_names
    if isinstance(model.card, ModelCard):
        return curl_command(url, names[0] if names else model.base_name)
    return image_command(url, {"prompt": "a red fox", "adapters": list(names[:1])})


def image_command(url: str, body: dict[str, Any]) -> str:
    return (
        f"curl {url}/v1/images/generations -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )


def weight_text(card: ModelCard) -> str:
    """Return how quantised weights are kept; empty if there are none."""
    if card.kept_formats:
        return f"kept as {' and '.join(card.kept_formats)}"
    stored = "" if card.shapes is None else card.shapes.quantisation
    return stored and f"{stored}, dequantised to {card.dtype} when loaded"


def engine_facts(card: HostCard) -> Iterator[tuple[str, str]]:
    """Yield the device of a running engine and the sizes that follow from it, by name."""
    device = "CPU" if card.gpu_name is None else f"{card.gpu_name} ({card.device})"
    yield "Device", f"{device}, {card.dtype}"
    if isinstance(card, ModelCard) and (weights := weight_text(card)):
        yield "Weights", weights
    page_bytes = card.pool_bytes // max(1, card.num_pages)
    pages = f", {card.num_pages} pages of {size_text(page_bytes)}" if card.num_pages else ""
    use = "adapters of images"
    if isinstance(card, ModelCard):
        use = f"KV cache ({card.kv_cache_dtype or card.dtype}) and adapters"
    yield "Page pool", f"{size_text(card.pool_bytes)}{pages} for {use}"
    yield "Host memory", f"{size_text(card.host_memory_bytes)} for adapters"
    if isinstance(card, ModelCard):
        yield "Batch", f"{card.max_batch_tokens} tokens a step, {card.max_sequences} sequences"
    elif isinstance(card, ImageCard):
        yield "Batch", f"{card.max_tokens} image tokens a step, {card.max_sequences} images"
    if isinstance(card, ModelCard) and card.compiles_kernels:
        note = "torch's until the compiled ones are ready, in about a minute: the first start only"
        yield "Kernels", f"{note}. Answers stay within 1e-4 in the logits"
    if card.start_seconds:
        # Phases may overlap, so that their sum is more than the time of the start.
        phases = (f"{phase} {seconds:.1f} s" for phase, seconds in card.start_seconds.items())
        yield "Engine start", ", ".join(phases)


def server_url(host: str, port: int, *, is_https: bool = False) -> str:
    """Return the URL of the server; for a wildcard address, that of the loopback interface."""
    host = EVERYWHERE.get(host, host)
    scheme = "https" if is_https else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def curl_command(url: str, model: str) -> str:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": messages, "temperature": 0, "max_tokens": 64})
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


# Exit statuses that a shell reports for these signals.
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
    """Starts the server, calls on_ready when it accepts requests, and returns the exit status."""

    def __call__(
        self,
        config: ServeConfig,
        *,
        progress: Callable[[str, float], None],
        downloads: ByteSink,
        on_ready: Callable[[ServerReady], None],
    ) -> int: ...


class ServeCommand(TyperCommand):
    """A command whose list flags take several values, and that knows vLLM's flags."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        try:
            own = translate_vllm_flags(args)
        except InvalidRequest as error:
            show_error(Console(stderr=True), str(error))
            raise typer.Exit(2) from error
        return super().parse_args(ctx, one_value_per_flag(own))


def one_value_per_flag(args: Sequence[str]) -> list[str]:
    """Repeat list flags: --lora-modules a=x b=y becomes --lora-modules a=x --lora-modules b=y."""
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

    Requests select an adapter by its name in `model`; all adapters share one batch.

    [bold]Examples[/bold]

    loramux serve

    loramux serve --model Qwen/Qwen3-0.6B

    loramux serve --model ./Qwen3-0.6B --lora-modules sql=./sql-lora support=./support-lora

    loramux serve --config serve.toml --port 9000

    Every option may be set in the TOML file (port = 9000, lora-modules = ["sql=./sql-lora"]); a
    flag replaces the file's value, and relative paths in the file start at its folder.

    Ctrl-C or SIGTERM: running requests get --drain-s seconds to finish. Exit status 0 after a clean
    stop, 1 if the server could not start or failed, 2 for an invalid setting.
    """
    console = Console()
    try:
        given = {name: value for name, value in flags.items() if value is not None}
        settings = load_serve_config(given, config)
        settings = replace(settings, images=with_demo(settings.images))
    except InvalidRequest as error:
        show_error(Console(stderr=True), str(error))
        raise typer.Exit(2) from error
    raise typer.Exit(run(settings, console, partial(import_launch, settings)))


def flag_parameter(
    setting: Setting, *, panel: str | None = None, alias: str | None = None
) -> inspect.Parameter:
    """Return the parameter that typer turns into the setting's option; None means not given.

    An alias is a hidden option under a former name of the setting.
    """
    kind = FLAG_TYPES.get(setting.kind, str)
    parser = count_or_auto if setting.kind is Kind.COUNT and setting.may_be_auto else None
    has_default = setting.default not in (None, (), False) and setting.kind is not Kind.SIZE
    default = f" Default: {setting.default}." if has_default else ""
    option = typer.Option(
        parser=parser,
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


def count_or_auto(text: str) -> int | str:
    return text if text == AUTO else int(text)


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


def import_launch(config: ServeConfig) -> Launch:
    # Imported late: this takes seconds, and `--help` needs none of it. The engine process, which
    # imports torch, starts meanwhile.
    if not config.serves_text:
        from loramux.launch import serve as launch

        return launch.serve
    from loramux.worker.spawn import spawn_worker

    worker = spawn_worker()
    try:
        from loramux.launch import serve as launch
    except BaseException:
        worker.close()
        raise
    return partial(launch.serve, worker=worker)


def run(config: ServeConfig, console: Console, find_launch: Callable[[], Launch]) -> int:
    signal.signal(signal.SIGTERM, stop)
    with ServeView(console) as view:
        view.show_plan(config)
        try:
            view.progress("Starting", 0.0)
            launch = find_launch()
            return launch(config, progress=view.progress, downloads=view, on_ready=view.show_ready)
        except KeyboardInterrupt:
            view.show_stopped()
            return 0 if view.is_ready else STOPPED_BY_CTRL_C
        except Stopped:
            view.show_stopped()
            return 0 if view.is_ready else STOPPED_BY_SIGTERM
        except (LoramuxError, OSError) as error:
            view.stop_progress()
            show_error(Console(stderr=True), str(error))
            return 1


class Stopped(SystemExit):
    """Raised by SIGTERM, so that the start is unwound. asyncio lets a SystemExit pass."""


def stop(signal_number: int, frame: object) -> None:
    """Signal handler during the start. uvicorn replaces it, and calls it after the drain."""
    raise Stopped(STOPPED_BY_SIGTERM)
