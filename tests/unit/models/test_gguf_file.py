"""Small GGUF files written from random models, and the real one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from loramux.errors import UnsupportedModel
from loramux.models.gguf_file import (
    GGUF_ARCHITECTURES,
    LAYER_TENSORS,
    MODEL_TENSORS,
    converted_folder,
)
from loramux.models.loader import load_model
from tests.model_factory import DenseAttention, tiny_transformers_model

# Over the names and bytes of all tensors; equal to what transformers 5.22 dequantizes with
# AutoModelForCausalLM.from_pretrained(folder, gguf_file=..., dtype=torch.float32,
# quantization_config=GgufConfig(dequantize=True)).state_dict()
SMOLLM2_TENSORS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"

Quantize = Callable[[gguf.GGUFWriter, str, Any], None]


def pairs_from_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return what llama.cpp does to q and k of a Llama when it writes them."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    if name in MODEL_TENSORS.values():
        return next(key for key, value in MODEL_TENSORS.items() if value == name)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert match is not None
    part = next(key for key, value in LAYER_TENSORS.items() if value == match[2])
    return f"blk.{match[1]}.{part}.{match[3]}"


def plain(writer: gguf.GGUFWriter, name: str, values: Any) -> None:
    writer.add_tensor(name, np.ascontiguousarray(values))


def write_gguf(path: Path, architecture: str, model: Any, add: Quantize = plain) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [*sorted(ByteLevel.alphabet())[:255], "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    heads = {
        "q_proj.weight": config.num_attention_heads,
        "k_proj.weight": config.num_key_value_heads,
    }
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        num_heads = next((n for part, n in heads.items() if part in name), None)
        if num_heads and GGUF_ARCHITECTURES[architecture].interleaves_heads:
            values = pairs_from_halves(values, num_heads)
        add(writer, gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("llama", "llama"), ("llama", "smollm2"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_converted_model_computes_what_the_original_does(
    tmp_path: Path, architecture: str, family: str
) -> None:
    # A GGUF file cannot say that sliding windows are on.
    off = {"use_sliding_window": False} if family == "qwen2" else {}
    model = tiny_transformers_model(family, **off)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", architecture, model), dtype=torch.float32)
    tokens = torch.arange(3, 40)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
        hidden = loaded.decoder(tokens, torch.arange(len(tokens)), DenseAttention())
        torch.testing.assert_close(loaded.decoder.logits(hidden), expected, atol=1e-4, rtol=1e-4)
    assert loaded.name == "m"
    assert loaded.eos_token_ids == (2,)
    assert loaded.config.tie_embeddings == model.config.tie_word_embeddings


def test_quantized_tensors_become_exactly_what_gguf_dequantizes(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0

    def as_q8(writer: gguf.GGUFWriter, name: str, values: Any) -> None:
        if "norm" in name:
            plain(writer, name, values)
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)

    model = tiny_transformers_model("llama")
    folder = converted_folder(write_gguf(tmp_path / "q8.gguf", "llama", model, as_q8))
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        # Q8_0 works on blocks of one row, so moving rows before or after is the same.
        expected = values if "norm" in name else dequantize(quantize(values, kind), kind)
        assert np.array_equal(tensors[name], expected), name


def test_second_load_does_not_convert_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "again.gguf", "llama", tiny_transformers_model("llama"))
    seen: list[float] = []
    first = converted_folder(path, progress=lambda stage, fraction: seen.append(fraction))
    assert seen[0] == 0.0 and seen[-1] == 1.0 and seen == sorted(seen)
    seen.clear()
    assert converted_folder(path, progress=lambda stage, fraction: seen.append(fraction)) == first
    assert not seen


def test_other_content_under_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    path = tmp_path / "same.gguf"
    first = converted_folder(write_gguf(path, "llama", tiny_transformers_model("llama", seed=1)))
    second = converted_folder(write_gguf(path, "llama", tiny_transformers_model("llama", seed=2)))
    assert first != second


def test_two_conversions_at_once_leave_one_whole_folder(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "race.gguf", "llama", tiny_transformers_model("llama", seed=3))
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: converted_folder(path), range(4)))
    assert len(folders) == 1
    assert {file.name for file in folders.pop().iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert not list((cache / "models").glob(".partial-*"))


def test_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    def cut(stage: str, fraction: float) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    path = write_gguf(tmp_path / "cut.gguf", "llama", tiny_transformers_model("llama", seed=4))
    with pytest.raises(KeyboardInterrupt):
        converted_folder(path, progress=cut)
    assert not [p for p in (cache / "models").iterdir() if "cut" in p.name or "partial" in p.name]
    assert load_model(path, dtype=torch.float32).name == "cut"


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="'mamba'.*llama, qwen2, qwen3"):
        converted_folder(tmp_path / "x.gguf")


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"lacks tokenizer\.ggml\.tokens"):
        converted_folder(tmp_path / "x.gguf")


def test_unknown_tensor_is_named_not_dropped(tmp_path: Path) -> None:
    """Llama 3.1 files keep their rope scaling in one."""

    def with_factors(writer: gguf.GGUFWriter, name: str, values: Any) -> None:
        plain(writer, name, values)
        if name == "token_embd.weight":
            plain(writer, "rope_freqs.weight", np.ones(8, dtype=np.float32))

    model = tiny_transformers_model("llama")
    path = write_gguf(tmp_path / "x.gguf", "llama", model, with_factors)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        converted_folder(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all, but text" * 9])
def test_file_that_is_no_gguf_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"x\.gguf is not a readable GGUF file"):
        converted_folder(tmp_path / "x.gguf")


def test_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="does not exist"):
        converted_folder(tmp_path / "x.gguf")


@pytest.mark.slow
def test_real_weights_are_bit_identical_to_those_of_transformers(smollm2_folder: Path) -> None:
    tensors = load_file(smollm2_folder / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].tobytes())
    assert digest.hexdigest() == SMOLLM2_TENSORS_SHA256


def test_real_model_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    model = load_model(smollm2_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    attention, output, tokens = DenseAttention(), [], prompt
    with torch.inference_mode():
        for _ in range(12):
            start = len(prompt) + len(output) - len(tokens)
            positions = torch.arange(start, start + len(tokens))
            hidden = model.decoder(torch.tensor(tokens), positions, attention)
            tokens = model.decoder.logits(hidden[-1:]).argmax(-1).tolist()
            if tokens[0] in model.eos_token_ids:
                break
            output += tokens
    assert tokenizer.decode(output) == "The capital of France is Paris."
