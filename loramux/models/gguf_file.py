"""Converts a GGUF file once into a Hugging Face folder in the cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize

from loramux.errors import UnsupportedModel
from loramux.models.default_model import cache_folder
from loramux.models.digests import file_digest
from loramux.models.gguf_reader import GgufContents, GgufTensor, read_gguf
from loramux.models.gguf_tokenizer import write_tokenizer
from loramux.models.safetensors_writer import SafetensorsWriter

Progress = Callable[[str, float], None]
Array = np.ndarray[Any, np.dtype[np.float32]]

# Part of the folder's name; increment it when the output of the conversion changes.
CONVERSION = 2
STAGE = "Converting GGUF"


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    name: str
    """Name of the architecture in config.json."""
    interleaves_heads: bool = False
    """Rows of q and k are stored in interleaved pairs instead of halves."""


GGUF_ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", interleaves_heads=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
}

LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def converted_folder(path: Path, *, progress: Progress | None = None) -> Path:
    """Return the Hugging Face folder of this file, converting it first if needed."""
    if not path.is_file():
        raise UnsupportedModel(f"{path} does not exist.")
    parent = cache_folder() / "models"
    folder = parent / f"{path.stem}-{file_digest(path)[:16]}-{CONVERSION}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=parent, prefix=".partial-"))
    try:
        convert(path, partial, progress=progress)
        rename_unless_there(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def rename_unless_there(partial: Path, folder: Path) -> None:
    """Rename the folder, or keep the identical one that another process finished first."""
    try:
        os.rename(partial, folder)
    except OSError:
        if not folder.is_dir():
            raise


def convert(path: Path, folder: Path, *, progress: Progress | None = None) -> None:
    report = progress or (lambda stage, fraction: None)
    report(STAGE, 0.0)
    contents = read_gguf(path)
    metadata = contents.metadata
    architecture = gguf_architecture(metadata)
    write_tokenizer(metadata, folder)
    names = {tensor.name: checkpoint_name(tensor.name) for tensor in contents.tensors}
    config = hf_config(metadata, architecture, tied="output.weight" not in names)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shapes = {names[tensor.name]: tensor.shape for tensor in contents.tensors}
    with SafetensorsWriter(folder / "model.safetensors", shapes) as writer:
        for index, (name, values) in enumerate(weights(contents, architecture, config)):
            writer.write(names[name], values)
            report(STAGE, (index + 1) / len(names))


def gguf_architecture(metadata: Mapping[str, Any]) -> GgufArchitecture:
    name = metadata.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {name!r} is not supported; valid values: "
            f"{', '.join(GGUF_ARCHITECTURES)}. Use the model's Hugging Face folder."
        )
    return GGUF_ARCHITECTURES[name]


def checkpoint_name(name: str) -> str:
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    match = LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in LAYER_TENSORS:
        raise UnsupportedModel(
            f"The GGUF file holds the tensor {name}, which is not supported: "
            "use the model's Hugging Face folder."
        )
    return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.{match[3]}"


def hf_config(
    metadata: Mapping[str, Any], architecture: GgufArchitecture, *, tied: bool
) -> dict[str, Any]:
    """Return the settings of config.json that the metadata describes."""
    prefix = metadata["general.architecture"]
    num_heads = metadata[f"{prefix}.attention.head_count"]
    hidden_size = metadata[f"{prefix}.embedding_length"]
    config = {
        "architectures": [architecture.name],
        "model_type": prefix,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata[f"{prefix}.feed_forward_length"],
        "num_hidden_layers": metadata[f"{prefix}.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": metadata.get(f"{prefix}.attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": metadata[f"{prefix}.context_length"],
        "rms_norm_eps": metadata[f"{prefix}.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata.get(f"{prefix}.rope.freq_base", 10_000.0),
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    scaling = rope_scaling(metadata, prefix)
    return config | ({"rope_scaling": scaling} if scaling else {})


def rope_scaling(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    rope_type = metadata.get(f"{prefix}.rope.scaling.type", "none")
    if rope_type == "none":
        return None
    if rope_type != "linear":
        raise UnsupportedModel(
            f"Rope scaling {rope_type!r} in a GGUF file is not supported: use the model's "
            "Hugging Face folder."
        )
    return {"rope_type": "linear", "factor": metadata[f"{prefix}.rope.scaling.factor"]}


def weights(
    contents: GgufContents, architecture: GgufArchitecture, config: Mapping[str, Any]
) -> Iterator[tuple[str, Array]]:
    """Yield (GGUF name, float32 values in the row order of the checkpoint)."""
    num_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for tensor in contents.tensors:
        values = dequantized(tensor)
        part = tensor.name.split(".")[-2]
        if architecture.interleaves_heads and part in num_heads:
            values = halves_from_pairs(values, num_heads[part])
        yield tensor.name, values


def dequantized(tensor: GgufTensor) -> Array:
    try:
        values = dequantize(tensor.data, tensor.kind)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"{tensor.name} is quantised as {tensor.kind.name}, which cannot be read."
        ) from error
    if not np.isfinite(values).all():
        raise UnsupportedModel(
            f"{tensor.name} has NaN or infinite elements ({tensor.kind.name}): the file is "
            "damaged. Fetch it again."
        )
    return values


def halves_from_pairs(rows: Array, num_heads: int) -> Array:
    """Move row 2i + j of each head to row i + j * head_dim / 2."""
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def read_gguf_config(path: Path) -> Mapping[str, Any]:
    """Return the config.json settings that the metadata describes, without reading tensors."""
    contents = read_gguf(path)
    tied = all(tensor.name != "output.weight" for tensor in contents.tensors)
    return hf_config(contents.metadata, gguf_architecture(contents.metadata), tied=tied)
