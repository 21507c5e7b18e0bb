from __future__ import annotations

from pathlib import Path

from loramux.memory.usage import UsageFile


def test_the_busiest_known_adapters_of_earlier_runs_come_first(tmp_path: Path) -> None:
    UsageFile(tmp_path).save({"a": 3, "b": 10, "c": 1, "gone": 99})
    assert UsageFile(tmp_path).busiest(["a", "b", "c", "new"], 2) == ["b", "a"]


def test_counts_of_earlier_runs_decay(tmp_path: Path) -> None:
    UsageFile(tmp_path).save({"old": 10})
    UsageFile(tmp_path).save({"new": 6})
    assert UsageFile(tmp_path).busiest(["old", "new"], 1) == ["new"]
    for _ in range(12):
        UsageFile(tmp_path).save({})
    assert UsageFile(tmp_path).busiest(["old", "new"], 2) == []


def test_a_run_that_saves_often_counts_once(tmp_path: Path) -> None:
    usage = UsageFile(tmp_path)
    usage.save({"a": 1})
    usage.save({"a": 2})
    UsageFile(tmp_path).save({"b": 1})
    assert UsageFile(tmp_path).busiest(["a", "b"], 2) == ["a", "b"]


def test_an_unreadable_file_or_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "usage.json").write_text('{"a": "many"}')
    usage = UsageFile(tmp_path)
    assert usage.busiest(["a"], 5) == []
    (tmp_path / "file").write_text("")
    UsageFile(tmp_path / "file").save({"a": 1})
