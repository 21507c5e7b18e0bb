"""The `loramux` command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console

from loramux import __version__
from loramux.base.process_environment import set_process_environment
from loramux.cli import (
    audit,
    bench,
    chat,
    convert,
    deploy,
    doctor,
    draw,
    gc,
    keys,
    merge,
    plan,
    pull,
    push,
    receipts,
    registry,
    router,
    serve,
    sign,
    tenants,
    top,
    tune,
)
from loramux.cli.console import show_error

REGISTRY_COMMANDS: dict[str, Callable[..., None]] = {
    "push": push.push,
    "pull": pull.pull,
    "list": registry.list_adapters,
    "show": registry.show,
    "promote": registry.promote,
    "rollback": registry.rollback,
    "split": registry.split,
    "rm": registry.remove,
    "gc": gc.collect,
    "verify": registry.verify,
    "sign": sign.sign,
}
ACCESS_COMMANDS: dict[str, Callable[..., None]] = {
    "share": keys.share,
    "unshare": keys.unshare,
    "shares": keys.shares,
    "usage": tenants.usage,
}
REGISTRY_PANEL, ACCESS_PANEL = "Names and versions", "Access"

# Packages of each extra, and the extras of commands that need several.
PACKAGES = {
    "engine": (
        *("gguf", "huggingface_hub", "jinja2", "safetensors", "tokenizers", "torch", "tqdm"),
        "transformers",
    ),
    "server": ("llguidance", "prometheus_client", "starlette", "uvicorn"),
    "registry": ("alembic", "cryptography", "sqlalchemy"),
    "images": ("accelerate", "diffusers", "PIL"),
}
COMMANDS = {"serve": "server,cpu", "draw": "images"}

app = typer.Typer(
    name="loramux",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", cls=serve.ServeCommand)(serve.serve)
app.command("router")(router.router)
app.command("chat")(chat.chat)
app.command("doctor")(doctor.doctor)
app.command("merge", cls=merge.MergeCommand)(merge.merge)
app.command("convert")(convert.convert)
app.command("draw")(draw.draw)
app.command("plan")(plan.plan)
app.command("top")(top.top)
app.command("tune")(tune.tune)
app.add_typer(bench.app, name="bench")
app.add_typer(deploy.app, name="deploy")
for name, command in REGISTRY_COMMANDS.items():
    app.command(name, rich_help_panel=REGISTRY_PANEL)(command)
app.add_typer(keys.app, name="keys", rich_help_panel=ACCESS_PANEL)
app.add_typer(tenants.app, name="tenants", rich_help_panel=ACCESS_PANEL)
app.add_typer(audit.app, name="audit", rich_help_panel=ACCESS_PANEL)
for name, command in ACCESS_COMMANDS.items():
    app.command(name, rich_help_panel=ACCESS_PANEL)(command)
app.add_typer(receipts.app, name="receipts", rich_help_panel=REGISTRY_PANEL)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"loramux {__version__}")
        raise typer.Exit


@app.callback()
def loramux(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Many LoRA adapters on one base model, mixed in one batch."""
    set_process_environment()


def main() -> None:
    """Run the command, and say which extra brings a package that it lacks."""
    try:
        app()
    except ModuleNotFoundError as error:
        extra = extra_for(sys.argv[1:], error.name or "")
        if extra is None:
            raise
        message = f"{error.name} is not installed. Run: pip install 'loramux[{extra}]'"
        show_error(Console(stderr=True), message)
        raise SystemExit(1) from None


def extra_for(arguments: Sequence[str], module: str) -> str | None:
    """Return the extras that a command needs for a module; None: the module is of no extra."""
    package = module.partition(".")[0]
    found = next((extra for extra, some in PACKAGES.items() if package in some), None)
    command = next((one for one in arguments if not one.startswith("-")), "")
    return COMMANDS.get(command, found) if found is not None else None


if __name__ == "__main__":
    main()
