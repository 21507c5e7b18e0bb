"""The JSON Schema test suite: no invalid instance can be generated, and the figures of the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.schema_suite import download, measure, table

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "structured-output.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_invalid_instance_of_the_suite_can_be_generated(tmp_path: Path) -> None:
    found = measure(download(tmp_path), tmp_path / "tokenizer")
    assert found.num_instances > 1000
    assert found.invalid_accepted == []
    assert table(found) in PAGE
