"""B7: a grammar for a tokenizer without a decoder."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from loramux.engine.grammar.constraints import Constraints
from loramux.engine.grammar.library import Tables, tokenizer_json

WORDS = {"a": 0, "b": 1, "<unk>": 2, "</s>": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_the_error_names_what_the_tokenizer_lacks(folder: Path) -> None:
    with pytest.raises(ValueError, match="has no decoder"):
        Tables(tokenizer_json(folder), eos_token_ids=[3], vocab_size=4)


def test_the_start_warns_of_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    constraints = Constraints(4)
    constraints.use_tokenizer(folder, [3])
    with caplog.at_level(logging.WARNING):
        constraints.prepare()
        end = time.monotonic() + 20
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.01)
    assert "cannot be constrained" in caplog.text and "has no decoder" in caplog.text
    constraints.close()
