"""Pipelines as one file, in the names of the checkpoints that people share."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from loramux.diffusion.lora_files.unet_names import sgm_names

_UNET_NORMS = {"norm1": "in_layers.0", "norm2": "out_layers.0"}
_VAE_ATTENTION = {
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    "group_norm": "norm",
}
_OPEN_CLIP = {
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
}


def sdxl_checkpoint(pipe: Any) -> dict[str, Tensor]:
    """Return a Stable Diffusion XL pipeline as A1111 and ComfyUI keep it."""
    found = {f"model.diffusion_model.{k}": v for k, v in unet_tensors(pipe.unet).items()}
    found |= {f"first_stage_model.{k}": v for k, v in vae_tensors(pipe.vae).items()}
    found |= clip_tensors(pipe.text_encoder, "conditioner.embedders.0.transformer.")
    found |= {
        f"conditioner.embedders.1.model.{k}": v
        for k, v in open_clip_tensors(pipe.text_encoder_2).items()
    }
    return {key: value.contiguous().clone() for key, value in found.items()}


def clip_tensors(encoder: Any, prefix: str) -> dict[str, Tensor]:
    found = {}
    for key, value in encoder.state_dict().items():
        name = key if key.startswith(("text_model.", "text_projection")) else f"text_model.{key}"
        found[prefix + name] = value
    return found


def unet_tensors(unet: Any) -> dict[str, Tensor]:
    state = unet.state_dict()
    modules = {key.rpartition(".")[0] for key in state}
    names = dict(sgm_names(modules, unet.config.layers_per_block))
    for path in modules:
        head, _, last = path.rpartition(".")
        if last in _UNET_NORMS and "resnets" in path.split(".")[-3:]:
            neighbour = names[f"{head}.conv1"].removesuffix("in_layers.2")
            names[path] = neighbour + _UNET_NORMS[last]
    names["conv_norm_out"] = "out.0"
    return {
        f"{names[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": v for key, v in state.items()
    }


def vae_tensors(vae: Any) -> dict[str, Tensor]:
    num_blocks = len(vae.config.block_out_channels)
    found = {}
    for key, value in vae.state_dict().items():
        name = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", key)
        name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(
            r"up_blocks\.(\d+)\.(resnets\.(\d+)|upsamplers\.0)",
            lambda m: (
                f"up.{num_blocks - 1 - int(m[1])}." + (f"block.{m[3]}" if m[3] else "upsample")
            ),
            name,
        )
        name = re.sub(r"mid_block\.resnets\.(\d+)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        attention = re.search(r"mid_block\.attentions\.0\.(.+)\.(weight|bias)", name)
        if attention is not None:
            part = _VAE_ATTENTION[attention[1]]
            if part != "norm" and attention[2] == "weight":
                value = value[..., None, None]
            name = f"{name[: attention.start()]}mid.attn_1.{part}.{attention[2]}"
        name = name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        found[name] = value
    return found


def open_clip_tensors(encoder: Any) -> dict[str, Tensor]:
    state = dict(encoder.state_dict())
    found = {"text_projection": state.pop("text_projection.weight").T}
    for key, name in _OPEN_CLIP.items():
        found[name] = state.pop(key)
    for layer in range(encoder.config.num_hidden_layers):
        old, new = f"text_model.encoder.layers.{layer}.", f"transformer.resblocks.{layer}."
        for kind in ("weight", "bias"):
            joined = [state.pop(f"{old}self_attn.{part}_proj.{kind}") for part in "qkv"]
            found[f"{new}attn.in_proj_{kind}"] = torch.cat(joined)
            for part, name in (
                ("self_attn.out_proj", "attn.out_proj"),
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                found[f"{new}{name}.{kind}"] = state.pop(f"{old}{part}.{kind}")
    assert not state, sorted(state)
    return found
