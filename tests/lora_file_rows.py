"""LoRA files of SDXL and FLUX.1 in each format, and the deltas that they mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loramux.diffusion.adapter import ImageAdapter, LowRank
from loramux.diffusion.lora_files.unet_names import sgm_names
from tests.image_factory import shared_pipeline

R = 4
WIDTH = 32
FLUX_Q = "transformer_blocks.0.attn.to_q"
FLUX_QKV = "double_blocks.0.img_attn.qkv"
_random = torch.Generator().manual_seed(3)
Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_random) * 0.4


def pick(component: str, endings: tuple[str, ...], pipeline: str = "sdxl") -> Pairs:
    """Return a random pair for each module of the component whose path ends so."""
    found = {}
    for path, module in getattr(shared_pipeline(pipeline), component).named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() in (2, 4) and path.endswith(endings):
            shape = weight.shape
            found[path] = (rand(R, *shape[1:]), rand(shape[0], R, *(1,) * (weight.dim() - 2)))
    assert found
    return found


def kohya(prefix: str, pairs: Pairs, alpha: float = R / 2) -> dict[str, torch.Tensor]:
    """Return the pairs with an alpha that must be applied for them to come out right."""
    file = {}
    for path, (a, b) in pairs.items():
        name = prefix + path.replace(".", "_")
        file[f"{name}.lora_down.weight"] = a
        file[f"{name}.lora_up.weight"] = b * R / alpha
        file[f"{name}.alpha"] = torch.tensor(float(alpha))
    return file


def peft(prefix: str, pairs: Pairs) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}{path}.lora_{half}.weight": tensor
        for path, pair in pairs.items()
        for half, tensor in zip("AB", pair, strict=True)
    }


def old_name(path: str) -> str:
    for end in ("to_q", "to_k", "to_v", "to_out.0"):
        if path.endswith(f".{end}"):
            return path.removesuffix(end) + f"processor.{end.removesuffix('.0')}_lora"
    return f"{path}.lora"


def truth(**components: Pairs) -> ImageAdapter:
    made = {
        component: {path: LowRank(a, b.flatten(1)) for path, (a, b) in pairs.items()}
        for component, pairs in components.items()
    }
    return ImageAdapter(cid="truth", components=made)


UNET = pick("unet", ("attn1.to_q", "attn2.to_out.0", "ff.net.2"))
CONV = pick("unet", ("conv1", "downsamplers.0.conv", "time_emb_proj", "conv_shortcut"))
CLIP = pick("text_encoder", ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"))
SOME_CLIP = {p: pair for p, pair in CLIP.items() if p.endswith(("q_proj", "fc1"))}
CLIP_2 = pick("text_encoder_2", ("q_proj", "k_proj", "v_proj", "out_proj"))
T5 = pick("text_encoder_2", ("SelfAttention.q", "DenseReluDense.wo"), "flux")
A, B = rand(R, WIDTH), rand(3 * WIDTH, R)
QKV = {
    f"transformer_blocks.0.attn.to_{name}": (A, B[i * WIDTH : (i + 1) * WIDTH])
    for i, name in enumerate("qkv")
}
FUSED = {FLUX_QKV: (A, B)}


def text_names(pairs: Pairs) -> Pairs:
    return {f"text_model.{path.removeprefix('text_model.')}": pair for path, pair in pairs.items()}


def with_module(theirs: str, ours: str):
    """Return a fused file that also has one more module, and what it means."""
    weight = shared_pipeline("flux").transformer.get_submodule(ours).weight
    a, b = rand(R, weight.shape[1]), rand(weight.shape[0], R)
    mine = torch.cat(b.chunk(2)[::-1]) if "adaLN" in theirs else b
    return kohya("lora_unet_", FUSED | {theirs: (a, b)}), truth(transformer=QKV | {ours: (a, mine)})


def loha(pipeline: str, component: str, names: Mapping[str, tuple[str, ...]], rank: int = 2):
    """LoHa factors of each name, and the full deltas of the modules that the name stands for."""
    net = getattr(shared_pipeline(pipeline), component)
    file, meant = {}, {}
    for name, paths in names.items():
        weights = [net.get_submodule(path).weight for path in paths]
        rows, columns = sum(map(len, weights)), weights[0][0].numel()
        w = [rand(rows, rank), rand(rank, columns), rand(rows, rank), rand(rank, columns)]
        keys = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
        flat = name.replace(".", "_")
        file |= {f"lora_unet_{flat}.{key}": part for key, part in zip(keys, w, strict=True)}
        file[f"lora_unet_{flat}.alpha"] = torch.tensor(rank / 2)
        delta = 0.5 * (w[0] @ w[1]) * (w[2] @ w[3])
        for path, part in zip(paths, delta.split([len(x) for x in weights]), strict=True):
            shape = weights[0].shape[1:]
            meant[path] = (torch.eye(columns).view(columns, *shape), part)
    return file, truth(**{component: meant})


def tucker():
    """LoCon in Tucker form: 1 x 1, 3 x 3, 1 x 1."""
    path = "down_blocks.0.resnets.0.conv1"
    weight = shared_pipeline("sdxl").unet.get_submodule(path).weight
    down, mid, up = rand(R, weight.shape[1], 1, 1), rand(R, R, 3, 3), rand(weight.shape[0], R, 1, 1)
    parts = {"down": down, "mid": mid, "up": up}
    name = "lora_unet_" + path.replace(".", "_")
    file = {f"{name}.lora_{key}.weight": part for key, part in parts.items()}
    folded = torch.einsum("rshw,si->rihw", mid, down[:, :, 0, 0])
    return file, truth(unet={path: (folded, up)})


def single_block():
    """Return a fused linear1 of a width that is not 3072."""
    a, b = rand(R, WIDTH), rand(7 * WIDTH, R)
    block = "single_transformer_blocks.0."
    places = (("attn.to_q", 0, 1), ("attn.to_k", 1, 2), ("attn.to_v", 2, 3), ("proj_mlp", 3, 7))
    meant = {block + n: (a, b[first * WIDTH : last * WIDTH]) for n, first, last in places}
    return kohya("lora_unet_", {"single_blocks.0.linear1": (a, b)}), truth(transformer=meant)


def processors():
    unet = pick("unet", ("attn1.to_q", "attn2.to_v", "attn1.to_out.0", "ff.net.2"))
    file = {
        f"unet.{old_name(path)}.{half}.weight": tensor
        for path, pair in unet.items()
        for half, tensor in zip(("down", "up"), pair, strict=True)
    }
    return file, truth(unet=unet)


def xlabs():
    first = {"double_blocks.0.processor.qkv_lora1": (A, B)}
    single = rand(R, WIDTH), rand(WIDTH, R)
    second = {"single_blocks.0.processor.proj_lora": (rand(R, 5 * WIDTH), single[1])}
    file = {
        f"{name}.{half}.weight": tensor
        for name, pair in (first | second).items()
        for half, tensor in zip(("down", "up"), pair, strict=True)
    }
    meant = {"single_transformer_blocks.0.proj_out": second[next(iter(second))]}
    return file, truth(transformer=QKV | meant)


def sgm():
    """Return the original block names of the UNet."""
    originals = sgm_names(UNET, 2)
    named = {originals[path]: pair for path, pair in UNET.items()}
    assert not named.keys() & UNET.keys()
    return kohya("lora_unet_", named), truth(unet=UNET)


RIGHT, LOST, NO_EFFECT, WRONG, ERROR = "right", "lost", "no effect", "wrong", "error"
ROWS = {
    # name: (pipeline, file and what it means, what diffusers 0.42 does with it)
    "diffusers": ("sdxl", (peft("unet.", UNET), truth(unet=UNET)), RIGHT),
    "old-diffusers": ("sdxl", processors(), RIGHT),
    "kohya-alpha": ("sdxl", (kohya("lora_unet_", UNET), truth(unet=UNET)), RIGHT),
    "kohya-sgm": ("sdxl", sgm(), RIGHT),
    "kohya-locon": ("sdxl", (kohya("lora_unet_", CONV), truth(unet=CONV)), RIGHT),
    "kohya-text": (
        "sdxl",
        (
            kohya("lora_unet_", UNET)
            | kohya("lora_te1_", text_names(CLIP))
            | kohya("lora_te2_", text_names(CLIP_2)),
            truth(unet=UNET, text_encoder=CLIP, text_encoder_2=CLIP_2),
        ),
        RIGHT,
    ),
    "kohya-some-text": (
        "sdxl",
        (
            kohya("lora_unet_", UNET) | kohya("lora_te1_", text_names(SOME_CLIP)),
            truth(unet=UNET, text_encoder=SOME_CLIP),
        ),
        LOST,
    ),
    "peft-keys": ("sdxl", (peft("base_model.model.", UNET), truth(unet=UNET)), NO_EFFECT),
    "no-prefix": ("sdxl", (peft("", UNET), truth(unet=UNET)), NO_EFFECT),
    "loha": ("sdxl", loha("sdxl", "unet", {path: (path,) for path in UNET}), ERROR),
    "loha-conv": ("sdxl", loha("sdxl", "unet", {p: (p,) for p in CONV if "conv1" in p}), ERROR),
    "loha-full-rank": ("sdxl", loha("sdxl", "unet", {path: (path,) for path in UNET}, 12), ERROR),
    "tucker": ("sdxl", tucker(), ERROR),
    "flux-kohya-qkv": ("flux", (kohya("lora_unet_", FUSED), truth(transformer=QKV)), RIGHT),
    "flux-comfyui": (
        "flux",
        (
            {
                f"diffusion_model.{FLUX_QKV}.lora_{half}.weight": tensor
                for half, tensor in zip(("down", "up"), (A, B), strict=True)
            },
            truth(transformer=QKV),
        ),
        RIGHT,
    ),
    "flux-xlabs": ("flux", xlabs(), RIGHT),
    "flux-linear1": ("flux", single_block(), ERROR),
    "flux-img_in": ("flux", with_module("img_in", "x_embedder"), LOST),
    "flux-txt_in": ("flux", with_module("txt_in", "context_embedder"), LOST),
    "flux-time_in": (
        "flux",
        with_module("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
        LOST,
    ),
    "flux-vector_in": (
        "flux",
        with_module("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
        LOST,
    ),
    "flux-guidance_in": (
        "flux",
        with_module("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
        LOST,
    ),
    "flux-final-linear": ("flux", with_module("final_layer.linear", "proj_out"), LOST),
    "flux-final-norm": (
        "flux",
        with_module("final_layer.adaLN_modulation.1", "norm_out.linear"),
        LOST,
    ),
    "flux-alpha": (
        "flux",
        (
            {
                f"transformer.{FLUX_Q}.lora_down.weight": A,
                f"transformer.{FLUX_Q}.lora_up.weight": 2 * QKV[FLUX_Q][1],
                f"transformer.{FLUX_Q}.alpha": torch.tensor(R / 2),
            },
            truth(transformer={FLUX_Q: QKV[FLUX_Q]}),
        ),
        WRONG,
    ),
    "flux-ai-toolkit": ("flux", (peft("diffusion_model.", QKV), truth(transformer=QKV)), NO_EFFECT),
    "flux-original-peft": ("flux", (peft("", FUSED), truth(transformer=QKV)), NO_EFFECT),
    "flux-loha": ("flux", loha("flux", "transformer", {FLUX_QKV: tuple(QKV)}), NO_EFFECT),
    "flux-t5": (
        "flux",
        (
            kohya("lora_unet_", FUSED) | kohya("lora_te3_", T5),
            truth(transformer=QKV, text_encoder_2=T5),
        ),
        LOST,
    ),
    "flux-t5-older": (
        "flux",
        (
            kohya("lora_unet_", FUSED) | kohya("lora_te2_", T5),
            truth(transformer=QKV, text_encoder_2=T5),
        ),
        LOST,
    ),
    "flux-t5-comfyui": (
        "flux",
        (
            kohya("lora_unet_", FUSED) | peft("text_encoders.t5xxl.transformer.", T5),
            truth(transformer=QKV, text_encoder_2=T5),
        ),
        LOST,
    ),
}
