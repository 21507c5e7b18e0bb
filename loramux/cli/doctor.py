"""`loramux doctor`: may this adapter be served, and what does it hold?"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loramux.cli.doctor_view import show_report
from loramux.errors import LoramuxError

if TYPE_CHECKING:
    from loramux.adapters.peft.doctor import Report
    from loramux.types.model import BaseModelInfo

Progress = Callable[[str, float], None]


def doctor(
    path: Annotated[Path, typer.Argument(help="Adapter folder, as PEFT saves it.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Base model: a Hugging Face folder or a GGUF file. "
            "Default: the installed SmolLM2-135M-Instruct."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, nothing else.")
    ] = False,
    strict_base: Annotated[
        bool,
        typer.Option("--strict-base", help="Refuse an adapter that records another base's name."),
    ] = False,
    max_rank: Annotated[
        int | None, typer.Option(min=1, help="Refuse an adapter with a larger rank.")
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(help="Run the model to measure how far the adapter moves its logits."),
    ] = True,
) -> None:
    """Check a LoRA adapter as the engine does, and show what it holds.

    The exit status is 0 only if the adapter can be served.
    """
    messages = Console(stderr=True)
    with messages.status("Reading the adapter") as status:
        report = diagnose(
            path,
            model,
            strict_base=strict_base,
            max_rank=max_rank,
            progress=lambda stage, done: status.update(f"{stage} {done:.0%}"),
        )
        if probe and report.ok:
            status.update("Running the base model with and without the adapter")
            report = measure(report, model)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show_report(report, Console())
    raise typer.Exit(0 if report.ok else 1)


def diagnose(
    path: Path,
    model: Path | None,
    *,
    strict_base: bool,
    max_rank: int | None,
    progress: Progress | None = None,
) -> Report:
    """What the adapter's files say; needs the base's config but not its weights."""
    # Imported here and below, because torch takes seconds that `--help` should not.
    from loramux.adapters.peft.doctor import examine

    try:
        base = read_base(model, progress)
    except (LoramuxError, OSError) as error:
        return refuse(path, str(model or "default"), "unsupported_model", str(error))
    return examine(path, base, max_rank=max_rank, strict_base=strict_base)


def measure(report: Report, model: Path | None) -> Report:
    """Adds the largest change of a logit; a model that cannot run, or NaN, is a refusal."""
    from loramux.engine.probe import max_logit_change
    from loramux.models.default_model import default_model_path

    try:
        change = max_logit_change(model or default_model_path(), Path(report.folder))
    except (LoramuxError, OSError) as error:
        return refuse(Path(report.folder), report.base, "probe_failed", str(error))
    if not math.isfinite(change):
        reason = "With this adapter the model's logits are not finite: its weights are too large."
        return refuse(Path(report.folder), report.base, "not_finite", reason)
    warnings = report.warnings
    if change == 0:
        warnings += ("No logit changed on the fixed tokens: the adapter is as good as none.",)
    return replace(report, max_logit_change=change, warnings=warnings)


def read_base(model: Path | None, progress: Progress | None) -> BaseModelInfo:
    from loramux.models.architectures import base_info, parse_config
    from loramux.models.default_model import default_model_path
    from loramux.models.gguf_file import converted_folder
    from loramux.models.loader import model_name, read_config

    path = model or default_model_path()
    folder = converted_folder(path, progress=progress) if path.suffix == ".gguf" else path
    return base_info(parse_config(read_config(folder)), model_name(path))


def refuse(path: Path, base: str, code: str, reason: str) -> Report:
    from loramux.adapters.peft.doctor import Refusal, Report

    return Report(folder=str(path), base=base, refusal=Refusal(code, reason, ""))
