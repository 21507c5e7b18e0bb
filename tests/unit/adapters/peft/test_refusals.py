"""Every refusal code has a broken adapter."""

from __future__ import annotations

from loramux.adapters.peft.refusals import RefusalCode, name_some
from tests.broken_adapters import BROKEN

# Raised when a prompt is tokenized: see tests/unit/engine/test_adapter_tokenizers.py.
TOKENIZER_CODES = {"foreign_tokenizer", "broken_tokenizer", "tokenizer_too_large"}
# Needs a file of 8 GiB or a small pool: see tests/unit/adapters/test_loading.py.
SIZE_CODES = {"too_large"}


def test_every_code_has_a_broken_adapter() -> None:
    codes = {str(code) for code in RefusalCode} - TOKENIZER_CODES - SIZE_CODES
    assert {broken.code for broken in BROKEN} == codes


def test_broken_adapters_have_names_of_their_own() -> None:
    assert len({broken.name for broken in BROKEN}) == len(BROKEN)


def test_a_long_list_of_names_is_cut() -> None:
    assert name_some(["a", "b"]) == "a, b"
    assert name_some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
