"""`loramux doctor FILE --image-model MODEL`: check an adapter of an image model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

from loramux.cli.console import say, size_text, working
from loramux.cli.drawing import load_image_model
from loramux.errors import (
    AdapterNotFound,
    InvalidRequest,
    LoramuxError,
    Refusal,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from loramux.diffusion.lora_files.reader import AdapterReport


def examine_image_adapter(
    path: Path, model: str, config: str | None, *, probe: bool, as_json: bool
) -> NoReturn:
    """Print the verdict, and exit with status 0 only if the adapter can be served.

    `path` may be a name of the registry.
    """
    try:
        place = path if path.exists() else _registered(path)
        pipeline = load_image_model(model, config)
        with working("Reading the adapter"):
            report = pipeline.add_adapter("adapter", place)
        effects: list[float] = []
        if probe:
            with working("Running the base model with and without the adapter"):
                effects = pipeline.effects("adapter")
    except (LoramuxError, OSError) as error:
        _show_refusal(path, model, error, as_json=as_json)
    found = _fields(report, model, effects)
    if as_json:
        typer.echo(json.dumps({"ok": True, **found}, indent=2))
    else:
        console = Console()
        for label, text in _lines(report, model, effects):
            say(console, f"{label:<11}", text, style="bold")
        say(console, "OK: ", "this adapter can be served.", style="bold green")
    raise typer.Exit(0)


def _registered(name: Path) -> Path:
    """Return the folder of an adapter of the registry; a path that is no name of it as it is."""
    # Imported here: `--help` needs no database driver.
    from loramux.config.paths import find_data_paths
    from loramux.launch.library import LibraryOptions, open_library

    places = find_data_paths()
    if not Path(places.registry).exists() and "://" not in str(places.registry):
        return name
    with open_library(places, LibraryOptions()) as library:
        try:
            return library.open(str(name))[1]
        except (AdapterNotFound, InvalidRequest):
            return name


def _show_refusal(path: Path, model: str, error: Exception, *, as_json: bool) -> NoReturn:
    code = "unsupported_model" if isinstance(error, UnsupportedModel) else "unreadable"
    reason, fix = str(error), ""
    if isinstance(error, Refusal):
        code, reason, fix = error.code, error.reason, error.fix
    if as_json:
        found = {"ok": False, "adapter": str(path), "base": model}
        refusal = {"code": code, "reason": reason, "fix": fix}
        typer.echo(json.dumps({**found, "refusal": refusal}, indent=2))
    else:
        console = Console()
        say(console, f"REFUSED ({code}): ", reason, style="bold red")
        if fix:
            say(console, "Fix: ", fix, style="bold")
    raise typer.Exit(1)


def _fields(report: AdapterReport, model: str, effects: list[float]) -> dict[str, Any]:
    return {
        "adapter": str(report.path),
        "base": model,
        "cid": report.cid,
        "size_bytes": report.num_bytes,
        "formats": list(report.formats),
        "method": report.method,
        "components": dict(report.num_modules),
        "ranks": {str(rank): count for rank, count in report.ranks.items()},
        "trigger_words": list(report.trigger_words),
        "effects": effects,
    }


def _lines(report: AdapterReport, model: str, effects: list[float]) -> Iterator[tuple[str, str]]:
    yield "Adapter", str(report.path)
    yield "Base", model
    yield "CID", report.cid
    yield "Size", size_text(report.num_bytes)
    yield "Format", f"{report.method}; names of {', '.join(report.formats)}"
    counts = (f"{count} modules of {name}" for name, count in report.num_modules.items())
    yield "Components", ", ".join(counts)
    ranks = (f"{rank} ({count} modules)" for rank, count in report.ranks.items())
    yield "Ranks", ", ".join(ranks)
    yield "Trigger", ", ".join(report.trigger_words) or "the file names none"
    if effects:
        changes = ", ".join(f"{effect:.2%}" for effect in effects)
        yield "Effect", f"predictions of {len(effects)} steps change by {changes}"
