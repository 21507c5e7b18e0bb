"""LoRA files in the names of the original releases; see `tests.image_files`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from tests.image_files import (
    COMMON,
    Build,
    Change,
    Factors,
    LoraFile,
    Maker,
    Pairs,
    Tensors,
    downs,
    kohya,
    lokr_parts,
    peft,
)

Names = dict[str, tuple[str, ...]]
"""Name in the original -> the modules of diffusers whose rows it has, one after the other."""
DOUBLE = "transformer_blocks.0.attn."
QKV = tuple(f"{DOUBLE}to_{part}" for part in "qkv")
TEXT_QKV = tuple(f"{DOUBLE}add_{part}_proj" for part in "qkv")
BLOCK: Names = {
    "double_blocks.0.img_attn.qkv": QKV,
    "double_blocks.0.txt_attn.qkv": TEXT_QKV,
    "double_blocks.0.img_attn.proj": (f"{DOUBLE}to_out.0",),
    "double_blocks.0.txt_attn.proj": (f"{DOUBLE}to_add_out",),
}
ENDS: Names = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "final_layer.linear": ("proj_out",),
}
FINAL_NORM: Names = {"final_layer.adaLN_modulation.1": ("norm_out.linear",)}
"""Its halves are in the other order."""
SINGLE = "single_transformer_blocks.0."
FLUX: Names = BLOCK | {
    "double_blocks.0.img_mlp.0": ("transformer_blocks.0.ff.net.0.proj",),
    "double_blocks.0.txt_mlp.2": ("transformer_blocks.0.ff_context.net.2",),
    "double_blocks.0.img_mod.lin": ("transformer_blocks.0.norm1.linear",),
    "double_blocks.0.txt_mod.lin": ("transformer_blocks.0.norm1_context.linear",),
    "single_blocks.0.linear2": (f"{SINGLE}proj_out",),
    "single_blocks.0.modulation.lin": (f"{SINGLE}norm.linear",),
}
FLUX_LINEAR1: Names = {
    "single_blocks.0.linear1": (
        *(f"{SINGLE}attn.to_{part}" for part in "qkv"),
        f"{SINGLE}proj_mlp",
    )
}
FLUX_ENDS: Names = ENDS | {
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
}
FLUX2: Names = BLOCK | {
    "double_blocks.0.img_mlp.0": ("transformer_blocks.0.ff.linear_in",),
    "double_blocks.0.img_mlp.2": ("transformer_blocks.0.ff.linear_out",),
    "double_blocks.0.txt_mlp.0": ("transformer_blocks.0.ff_context.linear_in",),
    "double_blocks.0.txt_mlp.2": ("transformer_blocks.0.ff_context.linear_out",),
    "single_blocks.0.linear1": (f"{SINGLE}attn.to_qkv_mlp_proj",),
    "single_blocks.0.linear2": (f"{SINGLE}attn.to_out",),
}
FLUX2_TIMES: Names = ENDS | {
    "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
}
FLUX2_ENDS: Names = FLUX2_TIMES | {
    f"{name}.lin": (f"{name}.linear",)
    for name in (
        "double_stream_modulation_img",
        "double_stream_modulation_txt",
        "single_stream_modulation",
    )
}
CUT: Names = {
    "sformer_blocks.0.attn.to_q": (f"{DOUBLE}to_q",),
    "sformer_blocks.0.ff.linear_in": ("transformer_blocks.0.ff.linear_in",),
}
WAN: Names = {
    f"blocks.{index}.{theirs}": (f"blocks.{index}.{ours}",)
    for index in range(2)
    for theirs, ours in (
        *((f"self_attn.{part}", f"attn1.to_{part}") for part in "qkv"),
        ("self_attn.o", "attn1.to_out.0"),
        *((f"cross_attn.{part}", f"attn2.to_{part}") for part in "qkv"),
        ("cross_attn.o", "attn2.to_out.0"),
        ("ffn.0", "ffn.net.0.proj"),
        ("ffn.2", "ffn.net.2"),
    )
}
WAN_ENDS: Names = {
    "text_embedding.0": ("condition_embedder.text_embedder.linear_1",),
    "text_embedding.2": ("condition_embedder.text_embedder.linear_2",),
    "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
    "time_embedding.2": ("condition_embedder.time_embedder.linear_2",),
    "time_projection.1": ("condition_embedder.time_proj",),
    "head.head": ("proj_out",),
}
Z_IMAGE: Names = {
    name: tuple(f"{group}.attention.to_{part}" for part in parts)
    for group in ("layers.0", "layers.1", "noise_refiner.0", "context_refiner.0")
    for name, parts in ((f"{group}.attention.qkv", "qkv"), (f"{group}.attention.out", ("out.0",)))
}


def rows_of(m: Maker, paths: Iterable[str]) -> tuple[int, int]:
    shapes = [m.shape(path) for path in paths]
    return sum(shape[0] for shape in shapes), shapes[0][1]


def changes_of(
    m: Maker, names: Names, deltas: dict[str, Tensor], *, swaps: Names
) -> dict[str, Change]:
    """Split the rows of each original among its modules."""
    found = {}
    for name, delta in deltas.items():
        paths = (names | swaps)[name]
        whole = torch.cat(delta.chunk(2)[::-1]) if name in swaps else delta
        parts = whole.split([m.shape(path)[0] for path in paths])
        found |= {path: Change(part) for path, part in zip(paths, parts, strict=True)}
    return found


def pairs_of(m: Maker, names: Names) -> Pairs:
    return {name: m.pair(rows_of(m, paths)) for name, paths in names.items()}


def original(m: Maker, names: Names, form: str, swaps: Names | None = None) -> LoraFile:
    swaps = swaps or {}
    pairs = pairs_of(m, names | swaps)
    forms = {
        "ai-toolkit": lambda: peft("diffusion_model.", pairs),
        "peft": lambda: peft("base_model.model.", pairs),
        "bare": lambda: peft("", pairs),
        "comfyui": lambda: downs("diffusion_model.", pairs),
        "kohya": lambda: kohya("lora_unet_", pairs),
        "kohya-no-alpha": lambda: kohya("lora_unet_", pairs, None),
    }
    deltas = {name: pair.delta for name, pair in pairs.items()}
    changes = changes_of(m, names, deltas, swaps=swaps)
    return LoraFile(forms[form](), {m.component: changes})


def original_lokr(m: Maker, names: Names, form: str, prefix: str) -> LoraFile:
    tensors: Tensors = {}
    deltas = {}
    for name, paths in names.items():
        parts, product = lokr_parts(m, rows_of(m, paths), form)
        tensors |= {f"{prefix}{name}.{key}": part for key, part in parts.items()}
        tensors[f"{prefix}{name}.alpha"] = torch.tensor(3.0)
        deltas[name] = product * {"full": 1.0, "factored": 1.5, "both": 3.0}[form]
    return LoraFile(tensors, {m.component: changes_of(m, names, deltas, swaps={})})


def with_diff_b(m: Maker, names: Names, *, zeros: bool = False, alpha: float = 0.0) -> LoraFile:
    """Return the difference of a bias has no scale."""
    made = original(m, names, "comfyui" if alpha else "ai-toolkit")
    tensors, changes = dict(made.tensors), dict(made.changes[m.component])
    for name, paths in names.items():
        bias = torch.cat([m.bias(path) for path in paths])
        tensors[f"diffusion_model.{name}.diff_b"] = bias
        if alpha:
            tensors[f"diffusion_model.{name}.alpha"] = torch.tensor(alpha)
        parts = bias.split([m.shape(path)[0] for path in paths])
        for path, part in zip(paths, parts, strict=True):
            delta = changes[path].delta
            changes[path] = Change(delta * (alpha / 4 if alpha else 1), part)
    if zeros:
        for norm in ("norm3", "self_attn.norm_q", "cross_attn.norm_k"):
            tensors[f"diffusion_model.blocks.0.{norm}.diff"] = torch.zeros(24)
        tensors["diffusion_model.blocks.0.norm3.diff_b"] = torch.zeros(24)
    return replace(made, tensors=tensors, changes={m.component: changes})


def head_in_full(m: Maker) -> LoraFile:
    """lightx2v: the difference of the head is a whole matrix."""
    made = with_diff_b(m, WAN)
    delta, bias = m.rand(*m.shape("proj_out")) * 0.1, m.bias("proj_out")
    tensors = {"diffusion_model.head.head.diff": delta, "diffusion_model.head.head.diff_b": bias}
    changes = {**made.changes[m.component], "proj_out": Change(delta, bias)}
    return replace(made, tensors=made.tensors | tensors, changes={m.component: changes})


def bias_alone(m: Maker) -> LoraFile:
    """AccVideo: a bias of a module without a change of its weight."""
    made = with_diff_b(m, WAN)
    bias = m.bias("condition_embedder.time_proj")
    tensors = {"diffusion_model.time_projection.1.diff_b": bias}
    changes = {**made.changes[m.component], "condition_embedder.time_proj": Change(None, bias)}
    return replace(made, tensors=made.tensors | tensors, changes={m.component: changes})


def xlabs(m: Maker) -> LoraFile:
    names: Names = {
        "double_blocks.0.processor.qkv_lora1": QKV,
        "double_blocks.0.processor.proj_lora1": (f"{DOUBLE}to_out.0",),
        "double_blocks.0.processor.qkv_lora2": TEXT_QKV,
        "single_blocks.0.processor.proj_lora": (f"{SINGLE}proj_out",),
    }
    pairs = pairs_of(m, names)
    deltas = {name: pair.delta for name, pair in pairs.items()}
    tensors = {
        key.replace("lora_A", "down").replace("lora_B", "up"): v
        for key, v in peft("", pairs).items()
    }
    return LoraFile(tensors, {m.component: changes_of(m, names, deltas, swaps={})})


def twice(m: Maker) -> LoraFile:
    """Fused matrices beside their parts, with the same change."""
    names = {name: paths for name, paths in Z_IMAGE.items() if name.endswith("qkv")}
    pairs = pairs_of(m, names)
    parts = {}
    for name, paths in names.items():
        for part, path, b in zip("qkv", paths, pairs[name].b.chunk(3), strict=True):
            parts[f"{path.rpartition('.')[0]}.to.{part}"] = Factors(pairs[name].a, b.contiguous())
    tensors = {
        key.replace("lora_A", "lora.down").replace("lora_B", "lora.up"): tensor
        for key, tensor in peft("diffusion_model.", pairs | parts).items()
    }
    deltas = {name: pair.delta for name, pair in pairs.items()}
    return LoraFile(tensors, {m.component: changes_of(m, names, deltas, swaps={})})


def convolutions(m: Maker) -> LoraFile:
    paths = [p for p, part in m.net.named_modules() if p.endswith(("conv1", "downsamplers.0.conv"))]
    pairs = m.pairs(paths)
    return m.file(kohya("lora_unet_", pairs), pairs)


def convolution_lokr(m: Maker, form: str) -> LoraFile:
    paths = [p for p, part in m.net.named_modules() if p.endswith("conv1")]
    tensors, changes = {}, {}
    for path in paths:
        rows, columns, *kernel = m.shape(path)
        left = m.rand(4, 4) * 0.5
        right = m.rand(rows // 4, columns // 4, *kernel) * 0.2
        name = "lora_unet_" + path.replace(".", "_")
        tensors[f"{name}.lokr_w1"] = left
        if form == "core":
            core, a, b = m.rand(2, 2, *kernel), m.rand(2, rows // 4), m.rand(2, columns // 4) * 0.1
            tensors |= {f"{name}.lokr_{k}": v for k, v in (("t2", core), ("w2_a", a), ("w2_b", b))}
            right = torch.einsum("ijhw,ip,jr->prhw", core, a, b)
        else:
            tensors[f"{name}.lokr_w2"] = right
        delta = torch.einsum("pq,rchw->prqchw", left, right)
        changes[path] = Change(delta.flatten(0, 1).flatten(1, 2))
    return LoraFile(tensors, {m.component: changes})


def biased_convolutions(m: Maker) -> LoraFile:
    paths = [p for p, part in m.net.named_modules() if p.endswith("conv1")]
    pairs = m.pairs(paths)
    tensors, changes = peft("unet.", pairs), {}
    for path, pair in pairs.items():
        bias = tensors[f"unet.{path}.lora_B.bias"] = m.bias(path)
        changes[path] = Change(pair.delta, bias)
    return LoraFile(tensors, {m.component: changes})


ORIGINALS: dict[str, dict[str, Build]] = {
    "flux": {
        **{
            f"original-{form}": lambda m, form=form: original(m, FLUX, form)
            for form in ("ai-toolkit", "peft", "bare", "comfyui", "kohya", "kohya-no-alpha")
        },
        "original-linear1": lambda m: original(m, FLUX_LINEAR1, "kohya"),
        "original-ends": lambda m: original(m, FLUX_ENDS, "kohya", FINAL_NORM),
        "original-lokr": lambda m: original_lokr(m, FLUX, "full", "diffusion_model."),
        "original-diff_b": lambda m: with_diff_b(m, FLUX, alpha=2.0),
        "xlabs": xlabs,
    },
    "flux2": {
        **{
            f"original-{form}": lambda m, form=form: original(m, FLUX2 | FLUX2_ENDS, form)
            for form in ("ai-toolkit", "peft", "bare", "comfyui", "kohya", "kohya-no-alpha")
        },
        "original-kohya-known": lambda m: original(m, FLUX2 | FLUX2_TIMES, "kohya"),
        "original-final-norm": lambda m: original(m, FLUX2, "ai-toolkit", FINAL_NORM),
        "original-cut": lambda m: original(m, CUT, "ai-toolkit"),
        **{
            f"original-lokr-{form}": lambda m, form=form: original_lokr(
                m, FLUX2 | FLUX2_ENDS, form, "diffusion_model."
            )
            for form in ("full", "factored", "both")
        },
        "original-lokr-peft": lambda m: original_lokr(m, FLUX2, "full", "base_model.model."),
        "original-lokr-kohya": lambda m: original_lokr(m, FLUX2, "full", ""),
        "fused-lokr": lambda m: original_lokr(m, {f"{DOUBLE}to_qkv": QKV}, "full", "transformer."),
    },
    "wan": {
        **{
            f"original-{form}": lambda m, form=form: original(m, WAN, form)
            for form in ("ai-toolkit", "peft", "bare", "comfyui", "kohya")
        },
        "original-ends": lambda m: original(m, WAN | WAN_ENDS, "ai-toolkit"),
        "diff_b": lambda m: with_diff_b(m, WAN | WAN_ENDS),
        "diff_b-alpha": lambda m: with_diff_b(m, WAN, alpha=2.0),
        "diff_b-zero-norms": lambda m: with_diff_b(m, WAN | WAN_ENDS, zeros=True),
        "diff_b-alone": bias_alone,
        "head-in-full": head_in_full,
    },
    "z_image": {
        **{
            f"original-{form}": lambda m, form=form: original(m, Z_IMAGE, form)
            for form in ("ai-toolkit", "peft", "comfyui", "kohya", "kohya-no-alpha")
        },
        "original-lokr": lambda m: original_lokr(m, Z_IMAGE, "full", "diffusion_model."),
        "twice": twice,
    },
    "sdxl": {
        "locon": convolutions,
        "convolutions-bias": biased_convolutions,
        "convolutions-lokr": lambda m: convolution_lokr(m, "full"),
        "convolutions-lokr-core": lambda m: convolution_lokr(m, "core"),
    },
}
FAMILIES = ("flux", "flux2", "qwen_image", "z_image", "wan", "sd3", "sdxl")
FILES: dict[tuple[str, str], Build] = {
    (family, name): build
    for family in FAMILIES
    for name, build in (COMMON | ORIGINALS.get(family, {})).items()
}
