"""The `loramux` command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

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


if __name__ == "__main__":
    app()
