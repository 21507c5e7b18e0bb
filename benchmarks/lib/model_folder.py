"""A model folder with random weights of real shapes, as `loramux serve --model` reads one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.lib.random_weights import llama_settings
from loramux.models.architectures import base_info, parse_config

SHARD_BYTES = 4 * 2**30
NUM_NOISE = 2**25 - 39
"""Values that are drawn once and repeated; an odd number, so that rows of weights differ."""
STD = 0.02
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint, stored in bfloat16."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return 2 * prod(self.shape)


def write_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write config, tokenizer and sharded bfloat16 weights; return the folder."""
    folder.mkdir(parents=True)
    settings = {**llama_settings(shape), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings))
    write_tokenizer(folder, shape["vocab_size"])
    shards = list(split_weights(llama_weights(settings)))
    noise = Noise()
    place: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / name, shard, noise)
        place |= {weight.name: name for weight in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return folder


def llama_weights(settings: dict[str, Any]) -> list[Weight]:
    hidden, vocabulary = settings["hidden_size"], settings["vocab_size"]
    found = [Weight("model.embed_tokens.weight", (vocabulary, hidden))]
    for layer in range(settings["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found.append(Weight(f"model.layers.{layer}.{norm}.weight", (hidden,)))
    for target in base_info(parse_config(settings), "random").targets:
        found.append(Weight(f"{target.path}.weight", (target.out_features, target.in_features)))
    found.append(Weight("model.norm.weight", (hidden,)))
    if not settings.get("tie_word_embeddings"):
        found.append(Weight("lm_head.weight", (vocabulary, hidden)))
    return found


def split_weights(weights: Iterable[Weight]) -> Iterator[list[Weight]]:
    """Group the weights into shards of at most SHARD_BYTES, in order."""
    shard: list[Weight] = []
    for weight in weights:
        if shard and sum(w.num_bytes for w in shard) + weight.num_bytes > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(weight)
    yield shard


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    values: Any = tensor.view(torch.uint8).numpy()
    return memoryview(values)


class Noise:
    """Gives out bfloat16 values from one buffer of normal noise, over and over."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(NUM_NOISE, generator=generator).mul_(STD).bfloat16()
        self._bytes = _bytes_of(noise)
        self._start = 0

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        while num_bytes:
            piece = self._bytes[self._start : self._start + num_bytes]
            num_bytes -= len(piece)
            self._start = (self._start + len(piece)) % len(self._bytes)
            yield piece


def write_shard(path: Path, weights: list[Weight], noise: Noise) -> None:
    """Write a safetensors file whose norms are 1 and whose other weights are noise."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + weight.num_bytes
        offsets = {"data_offsets": [start, end]}
        header[weight.name] = {"dtype": "BF16", "shape": list(weight.shape), **offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            if len(weight.shape) == 1:
                ones = torch.ones(weight.shape, dtype=torch.bfloat16)
                file.write(_bytes_of(ones))
                continue
            for piece in noise.take(weight.num_bytes):
                file.write(piece)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer that decodes every id; prompts are sent as token ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġw{number:x}" for number in range(vocab_size - len(alphabet)))
    vocabulary = {token: number for number, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
