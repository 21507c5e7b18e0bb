"""`loramux doctor`: check whether an adapter can be served, and show its contents."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.cli.console import ByteView, printable, say, size_text
from loramux.cli.drawing import IMAGE_CONFIG
from loramux.cli.image_doctor import examine_image_adapter
from loramux.cli.registry_view import recipe_lines
from loramux.errors import DoesNotFit, LoramuxError

if TYPE_CHECKING:
    from loramux.adapters.peft.doctor import Cost, ModuleReport, PartReport, Report
    from loramux.adapters.peft.field_report import FieldReport
    from loramux.types.model import BaseModelInfo

MODULE_PATH = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<module>.+)")
MAX_UNUSED_SHOWN = 8
UNSUPPORTED = "unsupported_model"
# Values with which a field of a config says nothing.
UNSET_VALUES: tuple[object, ...] = (None, False, [], {})


def show_report(report: Report, console: Console) -> None:
    for name, value in facts(report):
        say(console, f"{name:<9}", value, style="bold")
    if report.modules:
        console.print(module_table(report.modules))
    if report.parts:
        console.print(part_table(report.parts))
    if report.cost is not None:
        console.print(kind_table(report.cost))
    for field in report.fields:
        if field.status == "refused":
            say(console, "refused: ", f"{field.name} {field.note}", style="bold red")
    for warning in report.warnings:
        say(console, "warning: ", warning, style="bold yellow")
    if report.refusal is None:
        say(console, "OK: ", "this adapter can be served.", style="bold green")
    else:
        say(console, f"REFUSED ({report.refusal.code}): ", report.refusal.reason, style="bold red")
        if report.refusal.fix:
            say(console, "Fix: ", report.refusal.fix, style="bold")


def facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "Adapter", report.folder
    yield "Base", report.base
    if report.cid is not None:
        yield "CID", report.cid
    if report.size_bytes is not None:
        yield "Size", size_text(report.size_bytes)
        yield "Tensors", tensors_text(report)
        yield "Logits", logits_text(report.max_logit_change)
    if report.fields:
        yield "Fields", fields_text(report.fields)
    if report.cost is not None:
        yield "Cost", cost_text(report.cost)
    if report.recipe is not None:
        yield from recipe_lines(report.recipe)
    if report.num_signatures or report.signed_by:
        by = "not checked: give --signer" if report.signed_by is None else f"by {report.signed_by}"
        yield "Signed", f"{report.num_signatures} signatures, {by}"


def fields_text(fields: Iterable[FieldReport]) -> str:
    """Count the fields by what is done with them, and name those that are set."""
    by_status: dict[str, list[FieldReport]] = {"honoured": [], "harmless": [], "refused": []}
    for field in fields:
        by_status[field.status].append(field)
    texts = []
    for status, found in by_status.items():
        named = [field.name for field in found if field.value not in UNSET_VALUES]
        names = f" ({', '.join(named)})" if named else ""
        texts += [f"{len(found)} {status}{names}"] if found else []
    return "; ".join(texts)


def cost_text(cost: Cost) -> str:
    share = cost.token_bytes / max(1, cost.base_token_bytes)
    return (
        f"{cost.pages} pages of {size_text(cost.page_bytes)} in {cost.dtype}; a token reads "
        f"{size_text(cost.token_bytes)}, {share:.1%} of the base's "
        f"{size_text(cost.base_token_bytes)}"
    )


def tensors_text(report: Report) -> str:
    unused = report.tensors_unused
    shown = ", ".join(unused[:MAX_UNUSED_SHOWN])
    more = len(unused) - MAX_UNUSED_SHOWN
    names = f": {shown}{f' and {more} more' if more > 0 else ''}" if unused else ""
    return f"{report.tensors_used} used, {len(unused)} unused{names}"


def logits_text(change: float | None) -> str:
    return "not measured" if change is None else f"change by up to {change:.4g} on fixed tokens"


def module_table(modules: Sequence[ModuleReport]) -> Table:
    """Return a table with one row for all layers in which a module has the same rank, scale and
    dtype.
    """
    has_effects = any(module.effect is not None for module in modules)
    is_relative = any(module.relative is not None for module in modules)
    table = Table("module", "layers")
    for column in ("rank", "alpha", "scale"):
        table.add_column(column, justify="right")
    table.add_column("dtype")
    if has_effects:
        table.add_column("|ΔW| / |W|" if is_relative else "|ΔW|", justify="right")
    for (module, *values), found in group_by_layers(modules).items():
        effects = [one.relative if is_relative else one.effect for one in found]
        shown = [effects_text(effects, is_relative=is_relative)] if has_effects else []
        layers = [
            int(match["layer"]) for one in found if (match := MODULE_PATH.fullmatch(one.path))
        ]
        table.add_row(Text(printable(module)), layer_ranges(layers), *values, *shown)
    return table


def group_by_layers(
    modules: Iterable[ModuleReport],
) -> dict[tuple[str, ...], list[ModuleReport]]:
    groups: dict[tuple[str, ...], list[ModuleReport]] = defaultdict(list)
    for module in modules:
        found = MODULE_PATH.fullmatch(module.path)
        name = found["module"] if found else module.path
        values = (str(module.rank), f"{module.alpha:.6g}", f"{module.scale:.6g}", module.dtype)
        groups[name, *values].append(module)
    return groups


def effects_text(effects: Iterable[float | None], *, is_relative: bool) -> str:
    """Format the smallest and the largest effect of a row."""
    known = [effect for effect in effects if effect is not None]
    if not known:
        return "–"
    texts = [f"{one:.2%}" if is_relative else f"{one:.3g}" for one in (min(known), max(known))]
    return " to ".join(dict.fromkeys(texts))


def part_table(parts: Iterable[PartReport]) -> Table:
    """Return a table with one row for all layers in which a part has the same kind and shape."""
    table = Table("kind", "module", "layers")
    for column in ("shape", "norm"):
        table.add_column(column, justify="right")
    groups: dict[tuple[str, str, str], list[PartReport]] = defaultdict(list)
    for part in parts:
        groups[part.kind, part.module, f"{part.num_rows} x {part.width}"].append(part)
    for (kind, module, shape), found in groups.items():
        layers = layer_ranges(part.layer for part in found if part.layer >= 0)
        effects = effects_text((part.effect for part in found), is_relative=False)
        table.add_row(kind, Text(printable(module)), layers, shape, effects)
    return table


def kind_table(cost: Cost) -> Table:
    table = Table("kind")
    for column in ("modules", "in the file", "in the pool", "read per token"):
        table.add_column(column, justify="right")
    for kind in cost.kinds:
        sizes = (kind.file_bytes, kind.pool_bytes, kind.token_bytes)
        table.add_row(kind.kind, str(kind.modules), *map(size_text, sizes))
    return table


def layer_ranges(layers: Iterable[int]) -> str:
    """Format layer numbers as ranges: [0, 1, 2, 5] becomes 0-2, 5."""
    ranges: list[list[int]] = []
    for layer in sorted(layers):
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], layer]
        else:
            ranges.append([layer])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


Progress = Callable[[str, float], None]


PATH = typer.Argument(
    help="Adapter folder, as PEFT saves it; with --image-model also a .safetensors file."
)
SIGNER = typer.Option(
    metavar="FILE",
    help="Refuse an adapter without a signature of one of these public keys (PEM).",
)
IMAGE_MODEL = typer.Option(
    metavar="MODEL",
    help="Image model: a folder that diffusers saved, org/name[@revision] on the Hugging Face hub, "
    "or a .safetensors file with --image-config. The adapter is then one of images.",
)


def doctor(  # noqa: PLR0913  (one for each flag)
    path: Annotated[Path, PATH],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ORG/NAME",
            help="Base model: a Hugging Face folder, a GGUF file, or a model of the hub as "
            "org/name. Default: the installed SmolLM2-135M-Instruct.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    strict_base: Annotated[
        bool,
        typer.Option("--strict-base", help="Refuse an adapter whose config names another base."),
    ] = False,
    max_rank: Annotated[
        int | None, typer.Option(min=1, help="Refuse an adapter with a higher rank.")
    ] = None,
    signer: Annotated[list[Path] | None, SIGNER] = None,
    probe: Annotated[
        bool,
        typer.Option(help="Run the model to measure how much the adapter changes its logits."),
    ] = True,
    image_model: Annotated[str | None, IMAGE_MODEL] = None,
    image_config: Annotated[str | None, IMAGE_CONFIG] = None,
) -> None:
    """Check a LoRA adapter like the engine does, and show its contents.

    The exit status is 0 only if the adapter can be served.
    """
    if image_model is not None:
        examine_image_adapter(path, image_model, image_config, probe=probe, as_json=as_json)
    # Imported here: it is not needed for `--help`.
    from loramux.models.locate import locate_model

    messages = Console(stderr=True)
    try:
        with ByteView(messages) as bar:
            base = locate_model(model, sink=bar, with_weights=probe)
    except (LoramuxError, OSError) as error:
        show_and_exit(refuse(path, model or "default", UNSUPPORTED, str(error)), as_json)
    with messages.status("Reading the adapter") as status:
        report = diagnose(
            path,
            base,
            strict_base=strict_base,
            max_rank=max_rank,
            has_weights=probe,
            progress=lambda stage, done: status.update(f"{stage} {done:.0%}"),
        )
        if probe and report.ok:
            status.update("Running the base model with and without the adapter")
            report = measure(report, base)
        if report.ok:
            report = with_signature(report, signer or ())
    show_and_exit(report, as_json)


def show_and_exit(report: Report, as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show_report(report, Console())
    raise typer.Exit(0 if report.ok else 1)


def diagnose(
    path: Path,
    model: Path,
    *,
    strict_base: bool,
    max_rank: int | None,
    has_weights: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Check the adapter's files; this needs the base's config but not its weights.

    With `has_weights`, effects are also given relative to the weights of the base.
    """
    # Imported here and below: torch takes seconds to import, and `--help` needs none of it.
    from loramux.adapters.peft.doctor import examine
    from loramux.cli.costs import planned_here, with_cost

    try:
        base = read_base(model, progress)
    except (LoramuxError, OSError) as error:
        return refuse(path, str(model), UNSUPPORTED, str(error))
    norms = partial(weight_norms, model) if has_weights else None
    examined = partial(
        examine, path, base, max_rank=max_rank, strict_base=strict_base, weight_norms=norms
    )
    report = examined()
    if has_weights and report.ok and report.needs_base:
        from loramux.engine.probe import load_weights

        report = examined(base_weights=load_weights(model, base))
    if not report.ok:
        return report
    try:
        return with_cost(report, planned_here(base))
    except DoesNotFit as error:
        return refuse(path, base.name, "does_not_fit", str(error))


def weight_norms(model: Path, paths: Sequence[str]) -> Mapping[str, float]:
    from loramux.models.weight_norms import find_weight_norms

    return find_weight_norms(model, paths)


def measure(report: Report, model: Path) -> Report:
    """Add the largest change of a logit; refuse if the model cannot run or a logit is NaN."""
    from loramux.engine.probe import max_logit_change

    try:
        change = max_logit_change(model, Path(report.folder))
    except (LoramuxError, OSError) as error:
        return refuse(Path(report.folder), report.base, "probe_failed", str(error))
    if not math.isfinite(change):
        reason = "With this adapter the model's logits are not finite: its weights are too large."
        return refuse(Path(report.folder), report.base, "not_finite", reason)
    warnings = report.warnings
    if change == 0:
        warnings += ("No logit changed on the fixed tokens: the adapter has no effect.",)
    return replace(report, max_logit_change=change, warnings=warnings)


def with_signature(report: Report, signers: Iterable[Path]) -> Report:
    """Add what the signatures in the folder say; refuse if none is of the given keys."""
    from loramux.adapters.signature import find_verified, parse_signing_key, read_signatures
    from loramux.base.signing import read_pem
    from loramux.store.manifest import folder_manifest

    folder = Path(report.folder)
    try:
        keys = [parse_signing_key(read_pem(path).decode("utf-8", "replace")) for path in signers]
        given = read_signatures(folder)
        verified = find_verified(folder_manifest(folder), given, keys) if keys else None
    except (LoramuxError, OSError) as error:
        return refuse(folder, report.base, "bad_signature", str(error))
    if keys and verified is None:
        known = ", ".join(key.key_id for key in keys)
        reason = f"It has {len(given)} signatures, and none of the keys {known} has made one."
        return refuse(folder, report.base, "bad_signature", reason)
    by = None if verified is None else verified.key_id
    return replace(report, num_signatures=len(given), signed_by=by)


def read_base(path: Path, progress: Progress | None) -> BaseModelInfo:
    from loramux.models.architectures import base_info, parse_config
    from loramux.models.folder import model_name, read_config
    from loramux.models.gguf_file import converted_folder

    folder = converted_folder(path, progress=progress) if path.suffix == ".gguf" else path
    return base_info(parse_config(read_config(folder)), model_name(path))


def refuse(path: Path, base: str, code: str, reason: str) -> Report:
    from loramux.adapters.peft.doctor import Refusal, Report

    return Report(folder=str(path), base=base, refusal=Refusal(code, reason, ""))
