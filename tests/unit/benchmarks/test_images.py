"""The benchmark of images runs on a toy and compares all that it names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import images


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_a_toy_is_measured_and_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = "--shapes tiny --size 64 --steps 2 --rounds 1 --batches 1,2 --tolerance --out"
    monkeypatch.setattr(sys, "argv", ["images", *words.split(), str(tmp_path)])
    images.main()
    (record,) = tmp_path.glob("*.json")
    found = json.loads(record.read_text())
    text = json.dumps(found)
    for column in ("base s", "mixed s", "diffusers s", images.MIXED, images.STOCK):
        assert column in text
    (compared,) = next(one["rows"] for one in found["sections"] if "alone" in one["title"])
    assert compared["images"] == 2
    assert compared["largest difference"] < 1e-5
