"""The programs of scripts/ that decide about commits and releases."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("store: empty files are refused", None),
        ("server, router: one table of routes (half the code)", None),
        ("a" * 65 + ": what", None),
        ("a" * 66 + ": what", "72 characters"),
        ("Merge branch 'main'", "merge"),
        ("fix things", "area: what changed"),
        ("store: it works.", "full stop"),
    ],
)
def test_commit_subjects(script, subject, fault):
    found = script("check_commit_subject").faults(subject)
    assert (fault is None) == (not found)
    assert fault is None or any(fault in one for one in found)


def test_the_subject_is_the_first_line_that_is_no_comment(script, tmp_path):
    check = script("check_commit_subject")
    message = tmp_path / "message"
    message.write_text("# hint\n\nstore: it works\n\nmore")
    assert check.subject_of(message.read_text()) == "store: it works"
    assert check.main([str(message)]) == 0
    message.write_text("nothing said\n")
    assert check.main([str(message)]) == 1


def test_a_release_needs_a_dated_section_with_text(script):
    check = script("check_release")
    text = "## [Unreleased]\n\n## [1.2.0] - 2026-01-02\n\n- one\n\n## [1.1.0]\n\n- old\n"
    assert check.notes_of(text, "1.2.0") == "- one"
    for version, reason in (("1.1.0", "no date"), ("1.3.0", "no section")):
        with pytest.raises(ValueError, match=reason):
            check.notes_of(text, version)
    with pytest.raises(ValueError, match="says nothing"):
        check.notes_of("## [1.2.0] - 2026-01-02\n\n## [1.1.0] - 2026-01-01\n", "1.2.0")


def test_the_checkout_could_be_released():
    ended = subprocess.run([sys.executable, SCRIPTS / "check_release.py"], capture_output=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""What it is."""\n', None),
        ("", "needs a docstring"),
        ('"""What it is."""\nx = 1\n', "has code"),
        ('"""' + "line\n" * 6 + '"""\n', "over 5 lines"),
    ],
)
def test_a_package_has_a_short_docstring_and_no_code(script, source, fault):
    path = ROOT / "loramux" / "x" / "__init__.py"
    found = list(script("check_structure").init_faults(path, ast.parse(source)))
    assert (fault is None) == (not found)
    assert fault is None or fault in found[0]


def test_the_nearest_tests_of_a_change_are_those_that_import_it(script):
    quick = script("quick")
    tests = quick.nearest_tests([ROOT / "loramux" / "store" / "gc.py"])
    assert "tests/unit/store/test_gc.py" in tests[:5]
    assert quick.nearest_tests([ROOT / "docs" / "cli.md"]) == ["tests/unit/test_docs.py"]
    own = ROOT / "tests" / "unit" / "store" / "test_gc.py"
    assert quick.nearest_tests([own])[0] == "tests/unit/store/test_gc.py"


def test_the_report_counts_rooms_and_arrows(script, monkeypatch):
    report = script("structure_report")
    graph = {
        "p.a.one": frozenset({"p.b.two", "q"}),
        "p.b.two": frozenset({"p.flat"}),
        "p.flat": frozenset({"p.a.other"}),
        "p.a.other": frozenset(),
    }
    arrows = report._arrows(graph, "p")
    assert arrows == {"a": {"b"}, "b": {"flat"}, "flat": {"a"}}
    assert report._reaches(arrows, "b", "a")
    assert report._num_floors(graph, "p") == 4
    lines = list(report.report())
    assert any(line.startswith("loramux.server: ") and "floors" in line for line in lines)


def test_workflow_files_have_the_form_of_the_forge():
    files = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    check = (sys.executable, "-m", "check_jsonschema", "--builtin-schema")
    ended = subprocess.run([*check, "vendor.github-workflows", *files], capture_output=True)
    assert len(files) >= 3 and ended.returncode == 0, ended.stdout
