"""How a doctor's report looks on a terminal."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from loramux.adapters.peft.doctor import ModuleReport, Report

MODULE_PATH = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<module>.+)")
MAX_UNUSED_SHOWN = 8


def show_report(report: Report, console: Console) -> None:
    for name, value in facts(report):
        say(console, f"{name:<9}", value, style="bold")
    if report.modules:
        console.print(module_table(report.modules))
    for warning in report.warnings:
        say(console, "warning: ", warning, style="bold yellow")
    if report.refusal is None:
        say(console, "OK: ", "this adapter can be served.", style="bold green")
    else:
        say(console, f"REFUSED ({report.refusal.code}): ", report.refusal.reason, style="bold red")
        if report.refusal.fix:
            say(console, "Fix: ", report.refusal.fix, style="bold")


def say(console: Console, label: str, text: str, *, style: str) -> None:
    console.print(Text(label, style), Text(printable(text)), sep="", soft_wrap=True)


def facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "Adapter", report.folder
    yield "Base", report.base
    if report.cid is not None:
        yield "CID", report.cid
    if report.size_bytes is not None:
        yield "Size", size_text(report.size_bytes)
        yield "Tensors", tensors_text(report)
        yield "Logits", logits_text(report.max_logit_change)


def tensors_text(report: Report) -> str:
    unused = report.tensors_unused
    shown = ", ".join(unused[:MAX_UNUSED_SHOWN])
    more = len(unused) - MAX_UNUSED_SHOWN
    names = f": {shown}{f' and {more} more' if more > 0 else ''}" if unused else ""
    return f"{report.tensors_used} used, {len(unused)} unused{names}"


def logits_text(change: float | None) -> str:
    return "not measured" if change is None else f"change by up to {change:.4g} on fixed tokens"


def size_text(num_bytes: int) -> str:
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}" if unit != "bytes" else f"{num_bytes} bytes"


def module_table(modules: Iterable[ModuleReport]) -> Table:
    """One row for all layers in which a module has the same rank, scale and type."""
    table = Table("module", "layers")
    for column in ("rank", "alpha", "scale"):
        table.add_column(column, justify="right")
    table.add_column("dtype")
    for (module, *values), layers in group_by_layers(modules).items():
        table.add_row(Text(printable(module)), layer_ranges(layers), *values)
    return table


def group_by_layers(modules: Iterable[ModuleReport]) -> dict[tuple[str, ...], list[int]]:
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for module in modules:
        found = MODULE_PATH.fullmatch(module.path)
        name = found["module"] if found else module.path
        values = (str(module.rank), f"{module.alpha:.6g}", f"{module.scale:.6g}", module.dtype)
        groups[name, *values] += [int(found["layer"])] if found else []
    return groups


def layer_ranges(layers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> 0-2, 5"""
    ranges: list[list[int]] = []
    for layer in sorted(layers):
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], layer]
        else:
            ranges.append([layer])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def printable(text: str) -> str:
    """Names come out of the adapter's files: escape what could steer the terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
