"""The `loramux` command."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux import __version__
from loramux.cli import bench, chat, doctor, plan, serve, top

app = typer.Typer(
    name="loramux",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", cls=serve.ServeCommand)(serve.serve)
app.command("chat")(chat.chat)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("top")(top.top)
app.add_typer(bench.app, name="bench")


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


if __name__ == "__main__":
    app()
