"""A byte-level tokenizer of any size without a model's files, for engines with random weights."""

from __future__ import annotations

import json
from itertools import chain, islice, product
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = 0
"""The token that ends an answer."""
END_TEXT = "<|end|>"
_PIECES = ('{"', '":', '",', '"},', '"]', "],", "},", ": ", ", ", "true", "false", "null", "\n")


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in the vocabulary of GPT-2 and later."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def write_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Write a tokenizer of all bytes, pieces of JSON, numbers and words; return the folder."""
    alphabet = byte_alphabet()
    numbers = ("".join(digits) for size in (2, 3) for digits in product("0123456789", repeat=size))
    words = ("".join(word) for size in (2, 3, 4) for word in product(LETTERS, repeat=size))
    spaced = (" " + word for word in map("".join, product(LETTERS, repeat=3)))
    texts = chain(_PIECES, numbers, spaced, words)
    pieces = ("".join(alphabet[byte] for byte in text.encode()) for text in texts)
    tokens = [END_TEXT, *alphabet, *islice(pieces, vocab_size - 1 - len(alphabet))]
    if len(tokens) != vocab_size:
        raise ValueError(f"there are no more than {len(tokens)} pieces, and {vocab_size} wanted")
    end = {"id": END, "content": END_TEXT, "special": True, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content = {
        "version": "1.0",
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def decoder_of(folder: Path) -> dict[int, bytes]:
    """Return the bytes of each token of such a tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    of_character = {character: byte for byte, character in enumerate(byte_alphabet())}
    found = {
        number: bytes(of_character[character] for character in token)
        for token, number in content["model"]["vocab"].items()
        if number != END
    }
    return {**found, END: b""}
