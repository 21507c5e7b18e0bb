from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from loramux.adapters.peft.doctor import ModuleReport, Refusal, Report
from loramux.cli.console import size_text
from loramux.cli.doctor import layer_ranges, show_report


def rendered(report: Report, **console: Any) -> str:
    stream = io.StringIO()
    show_report(report, Console(file=stream, width=80, **console))
    return stream.getvalue()


def module(layer: int, name: str = "self_attn.q_proj", *, rank: int = 8) -> ModuleReport:
    path = f"model.layers.{layer}.{name}"
    return ModuleReport(path=path, rank=rank, alpha=16, scale=16 / rank, dtype="float32")


def served(**facts: Any) -> Report:
    cid = "cidv1:sha256:" + "0" * 64
    return Report(**{"folder": "f", "base": "b", "cid": cid, "size_bytes": 2048, **facts})


@pytest.mark.parametrize(
    ("layers", "text"),
    [([], ""), ([4], "4"), ([2, 0, 1], "0-2"), ([0, 1, 3, 5, 6, 7], "0-1, 3, 5-7")],
)
def test_layers_are_written_as_ranges_without_losing_any(layers: list[int], text: str) -> None:
    assert layer_ranges(layers) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(1023, "1023 bytes"), (1024, "1 KiB"), (3 * 2**19, "1.5 MiB"), (2**41, "2048 GiB")],
)
def test_sizes_change_unit_at_powers_of_1024(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_equal_layers_share_a_row_and_a_different_rank_gets_its_own() -> None:
    modules = (*(module(i) for i in range(30)), module(30, rank=4), module(0, "mlp.up_proj"))
    rows = [line for line in rendered(served(modules=modules)).splitlines() if "proj" in line]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells == [
        ["self_attn.q_proj", "0-29", "8", "16", "2", "float32"],
        ["self_attn.q_proj", "30", "4", "16", "4", "float32"],
        ["mlp.up_proj", "0", "8", "16", "2", "float32"],
    ]


def test_facts_stay_on_one_line_each_so_that_they_can_be_copied() -> None:
    warning = "long " * 30
    lines = rendered(served(warnings=(warning,), max_logit_change=1.5)).splitlines()
    assert f"CID      {served().cid}" in lines
    assert f"warning: {warning}" in lines
    assert "Logits   change by up to 1.5 on fixed tokens" in lines
    assert lines[-1] == "OK: this adapter can be served."


def test_unused_tensors_are_named_and_a_flood_of_them_is_cut() -> None:
    unused = tuple(f"t{i}" for i in range(20))
    text = rendered(served(tensors_used=4, tensors_unused=unused))
    assert "4 used, 20 unused: t0, t1, t2, t3, t4, t5, t6, t7 and 12 more" in text


def test_a_refusal_shows_code_reason_and_fix_and_never_ok() -> None:
    report = Report(folder="f", base="b", refusal=Refusal("wrong_shape", "Too wide.", "Narrow it."))
    lines = rendered(report).splitlines()
    assert lines[-2:] == ["REFUSED (wrong_shape): Too wide.", "Fix: Narrow it."]
    assert "OK" not in "".join(lines)


def test_names_from_an_adapter_cannot_steer_the_terminal_or_the_markup() -> None:
    text = rendered(served(folder="a\x1b[2J\r[red]b"), force_terminal=True)
    assert "\x1b[2J" not in text
    assert "\r" not in text
    assert "[red]b" in text


def test_the_verdict_has_a_colour_on_a_terminal() -> None:
    assert "\x1b[1;32mOK: " in rendered(served(), force_terminal=True, color_system="standard")
