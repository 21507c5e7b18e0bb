"""Adapters that must be refused, each with the expected code."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tests.adapter_factory import lora_config_dict, lora_tensors, tiny_base_info, write_adapter

Build = Callable[[Path, Any], None]
LAYER0 = "base_model.model.model.layers.0"
Q0 = f"{LAYER0}.self_attn.q_proj"
EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
TOKENS = "token_adapter.trainable_tokens_delta"
LONG = torch.ones(512, 4)
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Broken:
    name: str
    code: str
    build: Build
    """Writes the folder for the transformers config of the base."""
    max_rank: int | None = None
    strict_base: bool = False


def with_config(**overrides: Any) -> Build:
    """Build valid tensors with an invalid config."""

    def build(folder: Path, base_config: Any) -> None:
        write_adapter(folder, lora_config_dict(**overrides), lora_tensors(base_config))

    return build


def with_config_text(text: str) -> Build:
    def build(folder: Path, base_config: Any) -> None:
        write_adapter(folder, text, lora_tensors(base_config))

    return build


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any], **overrides: Any) -> Build:
    """Build tensors that `change` edits in place."""

    def build(folder: Path, base_config: Any) -> None:
        tensors = lora_tensors(base_config)
        change(tensors)
        write_adapter(folder, lora_config_dict(**overrides), tensors)

    return build


def sparse(folder: Path, base_config: Any) -> None:
    """Build a weights file of over 8 GiB that takes no room on the disk."""
    write_adapter(folder, lora_config_dict(), lora_tensors(base_config))
    os.truncate(folder / WEIGHTS, 2**33 + 1)


def with_bytes(make: Callable[[bytes], bytes]) -> Build:
    """Build a weights file from a valid one with `make`."""

    def build(folder: Path, base_config: Any) -> None:
        write_adapter(folder, lora_config_dict(), make(save(lora_tensors(base_config))))

    return build


def with_header(change: Callable[[dict[str, Any]], Any]) -> Build:
    """Build a weights file with a header that `change` edits in place."""

    def rewrite(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return with_bytes(rewrite)


def without(name: str) -> Build:
    def build(folder: Path, base_config: Any) -> None:
        with_config()(folder, base_config)
        (folder / name).unlink()

    return build


def replaced(name: str, replace: Callable[[Path], Any]) -> Build:
    def build(folder: Path, base_config: Any) -> None:
        without(name)(folder, base_config)
        replace(folder / name)

    return build


def moved_outside(path: Path) -> None:
    outside = path.parent.parent / f"{path.parent.name}-outside.safetensors"
    outside.write_bytes(b"")
    path.symlink_to(outside)


def only_a_pickle(folder: Path, base_config: Any) -> None:
    without(WEIGHTS)(folder, base_config)
    torch.save(lora_tensors(base_config), folder / "adapter_model.bin")


def disguised_pickle(folder: Path, base_config: Any) -> None:
    without(WEIGHTS)(folder, base_config)
    torch.save(lora_tensors(base_config), folder / WEIGHTS)


def for_another_size(folder: Path, base_config: Any) -> None:
    other = type(base_config)(
        **{**base_config.to_dict(), "hidden_size": 2 * base_config.hidden_size}
    )
    write_adapter(folder, lora_config_dict(), lora_tensors(other))


def for_more_layers(folder: Path, base_config: Any) -> None:
    layers = base_config.num_hidden_layers + 2
    other = type(base_config)(
        **{**base_config.to_dict(), "num_hidden_layers": layers, "layer_types": None}
    )
    write_adapter(folder, lora_config_dict(), lora_tensors(other))


def more_targets_than_tensors(folder: Path, base_config: Any) -> None:
    config = lora_config_dict(target_modules=["q_proj", "v_proj", "up_proj"])
    write_adapter(folder, config, lora_tensors(base_config))


def shortened_paths(folder: Path, base_config: Any) -> None:
    paths = [target.path for target in tiny_base_info(base_config).targets]
    fillers = [f"other{number}" for number in range(20)]
    config = lora_config_dict(target_modules=paths + fillers, layers_to_transform=[0])
    write_adapter(folder, config, lora_tensors(base_config))


def zero_every(half: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if f".lora_{half}." in name:
                tensor.zero_()

    return change


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(names: dict[str, Any]) -> None:
        names[new] = names.pop(old)

    return change


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


def set_value(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors[name][-1, -1].fill_(value)


FOLDERS = [
    Broken("config_is_a_folder", "unreadable", replaced(CONFIG, Path.mkdir)),
    Broken("weights_link_dangles", "unreadable", replaced(WEIGHTS, lambda p: p.symlink_to("gone"))),
    Broken("weights_link_loops", "unreadable", replaced(WEIGHTS, lambda p: p.symlink_to(p.name))),
    Broken("weights_are_a_pipe", "unreadable", replaced(WEIGHTS, os.mkfifo)),
    Broken("weights_link_outside", "link_outside", replaced(WEIGHTS, moved_outside)),
]
CONFIGS = [
    Broken("no_config", "config_missing", without(CONFIG)),
    Broken("huge_config", "config_too_large", with_config(auto_mapping={"x": "x" * 2**20})),
    Broken("config_cut_short", "config_not_json", with_config_text('{"peft_type": "LORA", "r"')),
    Broken("config_is_a_list", "config_not_json", with_config_text("[]")),
    Broken("config_too_deep", "config_not_json", with_config_text("[" * 200_000)),
    Broken("config_half_surrogate", "config_not_json", with_config(target_modules=["\ud800"])),
    Broken("other_method", "not_lora", with_config(peft_type="PREFIX_TUNING")),
    Broken("no_method", "not_lora", with_config(peft_type=None)),
    Broken("rank_is_a_text", "wrong_type", with_config(r="4")),
    Broken("alpha_is_a_text", "wrong_type", with_config(lora_alpha="8")),
    Broken("rslora_is_a_number", "wrong_type", with_config(use_rslora=1)),
    Broken("targets_are_numbers", "wrong_type", with_config(target_modules=[1])),
    Broken("layers_are_texts", "wrong_type", with_config(layers_to_transform=["0"])),
    Broken("rank_pattern_is_a_list", "wrong_type", with_config(rank_pattern=[4])),
    Broken("start_is_a_number", "wrong_type", with_config(init_lora_weights=3)),
    Broken("rank_is_zero", "bad_value", with_config(r=0)),
    Broken("alpha_is_infinite", "bad_value", with_config(lora_alpha=float("inf"))),
    Broken("alpha_is_nan", "bad_value", with_config(lora_alpha=float("nan"))),
    Broken(
        "layers_with_a_pattern",
        "bad_value",
        with_config(target_modules=".*q_proj", layers_to_transform=0),
    ),
    Broken("layers_pattern_alone", "bad_value", with_config(layers_pattern="layers")),
    Broken("paths_and_layers", "bad_value", shortened_paths),
    Broken("target_not_a_pattern", "bad_pattern", with_config(target_modules="(q_proj")),
    Broken("rank_not_a_pattern", "bad_pattern", with_config(rank_pattern={"*": 4})),
    Broken(
        "many_patterns", "bad_pattern", with_config(rank_pattern={f"a{n}": 4 for n in range(5000)})
    ),
    Broken("unknown_field", "unknown_field", with_config(lora_twist=0.5)),
    Broken("replicated_layers", "unsupported_field", with_config(layer_replication=[[0, 2]])),
    Broken("dora_without_magnitudes", "missing_tensors", with_config(use_dora=True)),
    Broken("lora_bias_without_biases", "missing_tensors", with_config(lora_bias=True)),
    Broken("dora_with_lora_bias", "bad_value", with_config(use_dora=True, lora_bias=True)),
    Broken("bias_of_unknown_kind", "bad_value", with_config(bias="some")),
    Broken("saved_head_missing", "missing_tensors", with_config(modules_to_save=["lm_head"])),
    Broken("saved_norms_missing", "missing_tensors", with_config(modules_to_save=["norm"])),
    Broken("saved_and_targeted", "bad_value", with_config(modules_to_save=["_proj"])),
    Broken("token_rows_missing", "missing_tensors", with_config(trainable_token_indices=[1])),
    Broken("tokens_are_texts", "wrong_type", with_config(trainable_token_indices=["a"])),
    Broken("tokens_twice", "bad_value", with_config(trainable_token_indices=[1, 1])),
    Broken(
        "tokens_of_a_projection",
        "unsupported_target",
        with_config(trainable_token_indices={"q_proj": [1]}),
    ),
    Broken("empty_arrow_config", "unsupported_field", with_config(arrow_config={})),
    Broken("unknown_start", "unsupported_field", with_config(init_lora_weights="magic")),
    Broken("pissa", "changes_base", with_config(init_lora_weights="pissa_niter_16")),
    Broken("loftq", "changes_base", with_config(init_lora_weights="loftq")),
    Broken(
        "other_base",
        "other_base",
        with_config(base_model_name_or_path="owner/another-model"),
        strict_base=True,
    ),
    Broken("no_target_names", "no_targets", with_config(target_modules=None)),
    Broken("no_target_found", "no_targets", with_config(target_modules=["query_key_value"])),
    Broken(
        "targets_the_head",
        "missing_tensors",
        with_config(target_modules=["q_proj", "v_proj", "lm_head"]),
    ),
    Broken("targets_all", "missing_tensors", with_config(target_modules=".*")),
    Broken("rank_over_cap", "rank_over_cap", with_config(), max_rank=3),
]
FILES = [
    Broken("no_weights", "weights_missing", without(WEIGHTS)),
    Broken("only_a_pickle", "pickle", only_a_pickle),
    Broken("disguised_pickle", "pickle", disguised_pickle),
    Broken("plain_pickle", "pickle", with_bytes(lambda _: b"\x80\x04}q\x00(X\x01" + bytes(90))),
    Broken(
        "lfs_pointer",
        "lfs_pointer",
        with_bytes(lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    ),
    Broken("a_web_page", "not_safetensors", with_bytes(lambda _: b"<!DOCTYPE html>" + b" " * 99)),
    Broken(
        "huge_header",
        "oversized_header",
        with_bytes(lambda content: struct.pack("<Q", 2**40) + content[8:]),
    ),
    Broken("sparse", "broken_safetensors", sparse),
    Broken("no_bytes", "truncated", with_bytes(lambda _: b"")),
    Broken("header_cut_short", "truncated", with_bytes(lambda content: content[:50])),
    Broken("data_cut_short", "truncated", with_bytes(lambda content: content[:-1])),
    Broken("bytes_too_many", "broken_safetensors", with_bytes(lambda content: content + b"\0")),
    Broken(
        "header_not_json",
        "broken_safetensors",
        with_bytes(lambda content: content[:9] + b"!" + content[10:]),
    ),
    Broken(
        "overlap",
        "broken_safetensors",
        with_header(
            lambda header: header[f"{Q0}.lora_B.weight"].update(
                header[f"{Q0}.lora_A.weight"], shape=[4, 32]
            )
        ),
    ),
    Broken(
        "offsets_out_of_range",
        "broken_safetensors",
        with_header(lambda header: header[f"{Q0}.lora_A.weight"].update(data_offsets=[0, 2**60])),
    ),
    Broken(
        "negative_shape",
        "broken_safetensors",
        with_header(lambda header: header[f"{Q0}.lora_A.weight"].update(shape=[-4, -32])),
    ),
    Broken(
        "integers",
        "bad_dtype",
        with_tensors(put(f"{Q0}.lora_A.weight", torch.ones(4, 32, dtype=torch.int8))),
    ),
]
TENSORS = [
    Broken("no_tensors", "no_tensors", with_tensors(dict.clear)),
    Broken(
        "without_prefix",
        "unknown_tensors",
        with_tensors(rename(f"{Q0}.lora_A.weight", "layers.0.q_proj.lora_A.weight")),
    ),
    Broken(
        "module_of_another_base",
        "unknown_tensors",
        with_tensors(
            lambda tensors: tensors.update(
                {
                    "base_model.model.model.layers.0.self_attn.c_attn.lora_A.weight": torch.ones(
                        4, 32
                    ),
                    "base_model.model.model.layers.0.self_attn.c_attn.lora_B.weight": torch.ones(
                        96, 4
                    ),
                }
            )
        ),
    ),
    Broken(
        "half_of_an_embedding",
        "incomplete_pair",
        with_tensors(put(f"{EMBED}.lora_embedding_A", torch.ones(4, 96))),
    ),
    Broken(
        "magnitudes",
        "dora_tensors",
        with_tensors(put(f"{Q0}.lora_magnitude_vector", torch.ones(48))),
    ),
    Broken("bias_of_b", "bias_tensors", with_tensors(put(f"{Q0}.lora_B.bias", torch.ones(48)))),
    Broken(
        "resized_head_without_embedding",
        "wrong_shape",
        with_tensors(put("base_model.model.lm_head.weight", torch.ones(96, 32))),
    ),
    Broken(
        "base_layer",
        "full_weights",
        with_tensors(put(f"{Q0}.base_layer.weight", torch.ones(48, 32))),
    ),
    Broken(
        "head_lora",
        "untargeted_tensors",
        with_tensors(
            lambda tensors: tensors.update(
                {f"{HEAD}.lora_A.weight": torch.ones(4, 32), f"{HEAD}.lora_B.weight": LONG}
            )
        ),
    ),
    Broken(
        "embedding_of_another_vocabulary",
        "wrong_shape",
        with_tensors(
            lambda tensors: tensors.update(
                {
                    f"{EMBED}.lora_embedding_A": torch.ones(4, 77),
                    f"{EMBED}.lora_embedding_B": torch.ones(32, 4),
                }
            ),
            target_modules=["q_proj", "v_proj", "embed_tokens"],
        ),
    ),
    Broken(
        "resized_embedding_without_head",
        "wrong_shape",
        with_tensors(put(f"{EMBED}.weight", torch.ones(99, 32))),
    ),
    Broken(
        "classifier",
        "unsupported_target",
        with_tensors(put("base_model.model.score.weight", torch.ones(3, 32))),
    ),
    Broken(
        "saved_head_norm",
        "unsupported_target",
        with_tensors(
            put(f"{LAYER0}.self_attn.q_norm.weight", torch.ones(12)), modules_to_save=["q_norm"]
        ),
    ),
    Broken(
        "saved_norm_too_long",
        "wrong_shape",
        with_tensors(put(f"{LAYER0}.input_layernorm.weight", torch.ones(33))),
    ),
    Broken(
        "bias_that_the_base_lacks",
        "bias_tensors",
        with_tensors(put(f"{Q0}.base_layer.bias", torch.ones(48)), bias="lora_only"),
    ),
    Broken(
        "magnitudes_of_an_untargeted_module",
        "untargeted_tensors",
        with_tensors(
            put(f"{LAYER0}.self_attn.o_proj.lora_magnitude_vector", torch.ones(32)), use_dora=True
        ),
    ),
    Broken(
        "tokens_of_no_config",
        "untargeted_tensors",
        with_tensors(put(f"{EMBED}.{TOKENS}", torch.ones(2, 32))),
    ),
    Broken(
        "token_beyond_the_vocabulary",
        "bad_value",
        with_tensors(put(f"{EMBED}.{TOKENS}", torch.ones(2, 32)), trainable_token_indices=[3, 512]),
    ),
    Broken(
        "tokens_and_lora_of_the_embedding",
        "bad_value",
        with_tensors(
            lambda tensors: tensors.update(
                {
                    f"{EMBED}.{TOKENS}": torch.ones(1, 32),
                    f"{EMBED}.lora_embedding_A": torch.ones(4, 512),
                    f"{EMBED}.lora_embedding_B": torch.ones(32, 4),
                }
            ),
            target_modules=["q_proj", "v_proj", "embed_tokens"],
            trainable_token_indices=[3],
        ),
    ),
    Broken(
        "embedding_under_two_names",
        "duplicate_tensors",
        with_tensors(
            lambda tensors: tensors.update(
                {
                    f"{EMBED}.weight": torch.ones(512, 32),
                    f"{EMBED}.base_layer.weight": torch.ones(512, 32),
                }
            )
        ),
    ),
    Broken(
        "two_names_for_one",
        "duplicate_tensors",
        with_tensors(put(f"{Q0}.lora_A.default.weight", torch.ones(4, 32))),
    ),
    Broken(
        "half_of_a_pair",
        "incomplete_pair",
        with_tensors(lambda tensors: tensors.pop(f"{Q0}.lora_B.weight")),
    ),
    Broken(
        "ungathered_shard", "empty_tensor", with_tensors(put(f"{Q0}.lora_A.weight", torch.ones(0)))
    ),
    Broken("another_hidden_size", "wrong_shape", for_another_size),
    Broken("more_layers", "layer_out_of_range", for_more_layers),
    Broken("tensors_missing", "missing_tensors", more_targets_than_tensors),
    Broken("tensors_untargeted", "untargeted_tensors", with_config(target_modules=["q_proj"])),
    Broken("tensors_excluded", "untargeted_tensors", with_config(exclude_modules=["v_proj"])),
    Broken("config_rank_differs", "wrong_rank", with_config(r=8)),
    Broken("pattern_rank_differs", "wrong_rank", with_config(rank_pattern={"layers.1.*q_proj": 2})),
    Broken(
        "halves_differ_in_rank",
        "wrong_rank",
        with_tensors(
            lambda tensors: tensors.update(
                {f"{Q0}.lora_A.weight": tensors[f"{Q0}.lora_A.weight"][:3].clone()}
            )
        ),
    ),
    Broken("nan", "not_finite", with_tensors(set_value(f"{Q0}.lora_A.weight", float("nan")))),
    Broken("infinity", "not_finite", with_tensors(set_value(f"{Q0}.lora_B.weight", -float("inf")))),
    Broken("untrained_b", "no_effect", with_tensors(zero_every("B"))),
    Broken("zero_a", "no_effect", with_tensors(zero_every("A"))),
    Broken("alpha_zero", "no_effect", with_config(lora_alpha=0)),
]
BROKEN = [*FOLDERS, *CONFIGS, *FILES, *TENSORS]
