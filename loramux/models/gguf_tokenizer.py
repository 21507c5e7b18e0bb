"""Writes a Hugging Face tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from loramux.errors import UnsupportedModel

CONTROL, USER_DEFINED = 3, 4
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Splitting:
    """Pre-tokenization: how text is split before the BPE merges."""

    pattern: str | None = None
    """None for the pattern of GPT-2."""
    single_digits: bool = False
    """Every digit is a piece of its own."""
    adds_bos: bool = False
    """Default when the file has no add_bos_token."""


# Keyed by tokenizer.ggml.pre.
SPLITTINGS: dict[str, Splitting] = {
    "default": Splitting(),
    "gpt-2": Splitting(),
    "smollm": Splitting(single_digits=True),
    "llama-bpe": Splitting(
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST, adds_bos=True
    ),
    "qwen2": Splitting(CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST),
}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the chat template."""
    tokenizer_model = metadata.get("tokenizer.ggml.model")
    if tokenizer_model != "gpt2":
        raise UnsupportedModel(
            f"GGUF tokenizer {tokenizer_model!r} is not supported, only 'gpt2' (byte-level BPE) "
            "is: use the model's Hugging Face folder."
        )
    splitting_name = metadata.get("tokenizer.ggml.pre", "default")
    if splitting_name not in SPLITTINGS:
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {splitting_name!r} is not supported; valid values: "
            f"{', '.join(SPLITTINGS)}. Use the model's Hugging Face folder."
        )
    splitting = SPLITTINGS[splitting_name]
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", splitting.adds_bos))
    tokenizer = byte_level_tokenizer(metadata, splitting)
    if adds_bos:
        add_bos(tokenizer, metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = tokenizer_config(metadata, adds_bos=adds_bos)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def byte_level_tokenizer(metadata: Mapping[str, Any], splitting: Splitting) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, token_kind in zip(tokens, kinds, strict=False)
            if token_kind == kind
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer


def pre_tokenizer(splitting: Splitting) -> pre_tokenizers.PreTokenizer:
    if splitting.pattern is None:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if not splitting.single_digits:
            return plain
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def add_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    bos = metadata["tokenizer.ggml.tokens"][bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


def tokenizer_config(metadata: Mapping[str, Any], *, adds_bos: bool) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos,
    }
    for name, key in SPECIAL_TOKENS.items():
        if (token_id := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            config[name] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
