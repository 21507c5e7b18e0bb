from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from loramux.errors import UnsupportedModel
from loramux.models.gguf_tokenizer import write_tokenizer

pytestmark = pytest.mark.slow

# Made with transformers 5.22, which needs 8 s to read them from the file itself:
# AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")(text).input_ids
SMOLLM2_IDS = {
    "The capital of France is Paris.": [504, 3575, 282, 4649, 314, 7042, 30],
    "What is 12345 + 678?": [1780, 314, 216, 33, 34, 35, 36, 37, 1232, 216, 38, 39, 40, 47],
    "  two  spaces\n\n\ttab\r\n": [216, 827, 216, 5600, 1116, 197, 15999, 2738],
    "don't we'll I'M it's": [12420, 982, 392, 3060, 339, 23, 61, 357, 506],
    "naïve café 😀": [3546, 46494, 37366, 40303, 218],
    "日本語": [23274, 115, 40993, 179, 120, 248],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "<|im_start|> < |im_end|>": [1, 2067, 2504, 306, 79, 486, 108, 46],
    "x[1:] ** 2  # ok": [104, 75, 33, 13372, 1903, 216, 34, 216, 907, 10907],
    # transformers reads [198, 198, ...] here: it does not know that smollm cuts digits off first,
    # which leaves the two line ends together, as in the tokenizer that the model was trained with.
    "\n\n1. one\n 2. two": [1116, 33, 30, 582, 3805, 34, 30, 827],
    "\x00\ufffd\u00a0\u200b": [190, 24211, 15442, 321, 229],
}
ALPHABET = sorted(ByteLevel.alphabet())


def metadata(**changes: Any) -> dict[str, Any]:
    """Return a vocabulary of all bytes, one merge, a control token and a user-defined one."""
    tokens = [*ALPHABET, "ab", "<|end|>", "<think>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 257,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def built(folder: Path, **changes: Any) -> Tokenizer:
    write_tokenizer(metadata(**changes), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_real_tokenizer_gives_the_ids_of_transformers(smollm2: Any, text: str) -> None:
    assert smollm2(text).input_ids == SMOLLM2_IDS[text]


# The vocabulary itself lacks some control bytes and those that begin planes above U+3FFFF.
TEXT = st.text(
    st.characters(
        max_codepoint=0x3FFFF, exclude_categories=("Cs", "Cc"), include_characters="\n\t\r"
    ),
    max_size=60,
)


@given(text=TEXT)
def test_real_tokenizer_loses_nothing(smollm2: Any, text: str) -> None:
    assert smollm2.decode(smollm2(text).input_ids) == text


def test_real_special_tokens_and_template_are_carried_over(smollm2: Any) -> None:
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    assert len(smollm2) == 49152
    assert smollm2.decode([1, 504, 2], skip_special_tokens=True) == "The"
    messages = [{"role": "user", "content": "hi"}]
    prompt = smollm2.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_control_and_user_tokens_stay_whole_but_only_control_is_special(tmp_path: Path) -> None:
    tokenizer = built(tmp_path)
    ids = tokenizer.encode("ab<think><|end|>").ids
    assert ids == [256, 258, 257]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>"


@pytest.mark.parametrize(
    ("changes", "adds"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
    ids=["silent", "asked", "llama", "llama refuses"],
)
def test_bos_is_added_when_the_file_or_its_kind_says(
    tmp_path: Path, changes: dict[str, Any], adds: bool
) -> None:
    tokenizer = built(tmp_path, **changes)
    assert (tokenizer.encode("ab").ids == [257, 256]) is adds
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [256]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is adds
    assert AutoTokenizer.from_pretrained(tmp_path)("ab").input_ids == tokenizer.encode("ab").ids


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "Ġ1234", "!", "Ċ", "Ċ", "b"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "!", "Ċ", "Ċ", "b"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "!ĊĊ", "b"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "!ĊĊ", "b"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_trained(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    cutter = built(tmp_path, pre=pre).pre_tokenizer
    assert [piece for piece, _ in cutter.pre_tokenize_str("a 1234!\n\nb")] == pieces


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"model": "llama"}, "'llama' is not supported"), ({"pre": "viking"}, "'viking'.*gpt-2")],
)
def test_unknown_kinds_are_refused_by_name(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        built(tmp_path, **changes)
    assert not list(tmp_path.iterdir())
