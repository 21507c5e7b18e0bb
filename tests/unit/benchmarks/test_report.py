from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.lib.report import (
    Panel,
    ReportWriter,
    Section,
    cell,
    draw,
    names,
    numbers,
    section_lines,
)

PANEL = Panel(
    title="Speed",
    x_label="batch",
    y_label="tok/s",
    x=["1", "32"],
    series={"base": [212.0, 5681.0], "LoRA": [None, 4565.0]},
)


def writer(folder: Path) -> ReportWriter:
    return ReportWriter(
        name="some", folder=folder, command="cmd", machine={"device": "cpu"}, settings={"a": 1}
    )


def test_a_section_is_on_disk_before_the_next_one_is_measured(tmp_path: Path) -> None:
    out = writer(tmp_path / "new")
    out.add(Section(title="First", rows=[{"batch": 1, "tok/s": 212.4}], notes=("why",)))
    out.add(Section(title="Second", rows=[{"batch": 32, "tok/s": 5681.2}]))
    record = json.loads(out.path("json").read_text())
    assert [section["title"] for section in record["sections"]] == ["First", "Second"]
    assert record["sections"][1]["rows"] == [{"batch": 32, "tok/s": 5681.2}]
    text = out.path("md").read_text()
    assert "| 32 | 5,681 |" in text and "why" in text and "`cmd`" in text


def test_rows_of_different_columns_make_one_table() -> None:
    rows: list[dict[str, object]] = [{"run": "base", "x": 1.0}, {"run": "LoRA", "loads": 3}]
    lines = section_lines(Section(title="T", rows=rows))
    assert lines[2:] == ["| run | x | loads |", "|---|---|---|", "| base | 1.000 | – |"] + [
        "| LoRA | – | 3 |"
    ]


def test_cells_have_about_four_significant_digits() -> None:
    values = (23456.7, 212.44, 13.131, 0.8794, None, "all", 8)
    assert [cell(value) for value in values] == [
        *("23,457", "212.4", "13.13", "0.879", "–", "all", "8")
    ]


@pytest.mark.parametrize("kind", ["bars", "lines"])
def test_the_plot_is_made_from_the_json_alone(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    out = writer(tmp_path)
    fields = {name: getattr(PANEL, name) for name in PANEL.__slots__}
    panel = Panel(**{**fields, "kind": kind})
    out.add(Section(title="T", rows=[{"a": 1}], panels=(panel, panel, panel)))
    picture = draw(out.path("json"))
    assert picture is not None and picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_tables_are_written_and_the_plot_command_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = writer(tmp_path)
    out.add(Section(title="T", rows=[{"a": 1}], panels=(PANEL,)))
    out.finish()
    printed = capsys.readouterr().out
    assert (
        "loramux[bench]" in printed
        and f"python -m benchmarks.lib.plots {out.path('json')}" in printed
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some.json", "some.md"]


def test_list_options() -> None:
    assert numbers("1,32,") == [1, 32]
    assert names(("few", "many"))("many,few") == ["many", "few"]
    with pytest.raises(argparse.ArgumentTypeError, match="lots: valid values are few, many"):
        names(("few", "many"))("few,lots")
