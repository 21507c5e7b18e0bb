"""LoRA files of seven image families in the formats that trainers write, and what each means.

The meaning is written down by this module alone: a change of weights and biases by module, which
the tests merge into the weights of an unchanged pipeline of diffusers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.image_factory import random_lengths, shared_pipeline

RANK = 4
FACTOR = 4
SDXL = ("attn1.to_q", "attn2.to_out.0", "attn2.to_k", "ff.net.2", "time_emb_proj", "proj_in")
Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Change:
    """What a file means for one module at weight 1."""

    delta: Tensor | None = None
    bias: Tensor | None = None
    lengths: Tensor | None = None
    """DoRA: the lengths of the rows of weight + delta."""

    def weight(self, base: Tensor, at: float) -> Tensor:
        if self.delta is None:
            return base
        moved = base + at * self.delta.view(base.shape)
        if self.lengths is None:
            return moved
        rows = moved.flatten(1)
        return (rows * (self.lengths / rows.norm(dim=1))[:, None]).view(base.shape)


Changes = Mapping[str, Change]


@dataclass(frozen=True, eq=False)
class LoraFile:
    tensors: Tensors
    changes: Mapping[str, Changes]
    """By component and module."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the LoraConfig of the denoiser, which diffusers writes into the header."""
    refusal: str = ""
    """The code with which it is refused."""
    hangs: bool = False
    """Whether diffusers 0.42.1 never returns from loading it."""


@dataclass(frozen=True, eq=False)
class Factors:
    """A low-rank pair of one module."""

    a: Tensor
    b: Tensor

    @property
    def delta(self) -> Tensor:
        return (self.b.flatten(1) @ self.a.flatten(1)).view(len(self.b), *self.a.shape[1:])

    def times(self, factor: float) -> Factors:
        return replace(self, b=self.b * factor)


Pairs = dict[str, Factors]


class Maker:
    """Makes files for one family."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.component = "unet" if name == "sdxl" else "transformer"
        self.net = getattr(shared_pipeline(name), self.component)
        self._random = torch.Generator().manual_seed(len(name))
        self.paths = [
            path
            for path, module in self.net.named_modules()
            if isinstance(module, nn.Linear) and (name != "sdxl" or path.endswith(SDXL))
        ]

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)

    def shape(self, path: str) -> torch.Size:
        return self.net.get_submodule(path).weight.shape

    def pair(self, shape: Sequence[int], rank: int = RANK) -> Factors:
        a = self.rand(rank, *shape[1:])
        ones = (1,) * (len(shape) - 2)
        return Factors(a * a[0].numel() ** -0.5, self.rand(shape[0], rank, *ones) * 0.3)

    def pairs(self, paths: Iterable[str] | None = None) -> Pairs:
        """Ranks differ."""
        found = self.paths if paths is None else paths
        return {
            path: self.pair(self.shape(path), RANK - index % 2) for index, path in enumerate(found)
        }

    def bias(self, path: str) -> Tensor:
        return self.rand(len(self.net.get_submodule(path).weight)) * 0.2

    def file(self, tensors: Tensors, pairs: Pairs, **more: Any) -> LoraFile:
        changes = {path: Change(pair.delta) for path, pair in pairs.items()}
        return LoraFile(tensors, {self.component: changes}, **more)


def peft(prefix: str, pairs: Pairs, middle: str = "") -> Tensors:
    return {
        f"{prefix}{path}.lora_{half}{middle}.weight": tensor
        for path, pair in pairs.items()
        for half, tensor in (("A", pair.a), ("B", pair.b))
    }


def downs(prefix: str, pairs: Pairs) -> Tensors:
    return {
        f"{prefix}{path}.lora_{half}.weight": tensor
        for path, pair in pairs.items()
        for half, tensor in (("down", pair.a), ("up", pair.b))
    }


def kohya(prefix: str, pairs: Pairs, alpha: float | None = 2.0) -> Tensors:
    """Flat names; the alpha must be applied for the pairs to come out right."""
    flat = {path.replace(".", "_"): pair for path, pair in pairs.items()}
    if alpha is None:
        return downs(prefix, flat)
    scaled = {name: pair.times(len(pair.a) / alpha) for name, pair in flat.items()}
    return downs(prefix, scaled) | alphas(prefix, scaled, alpha)


def alphas(prefix: str, pairs: Iterable[str], alpha: float) -> Tensors:
    return {f"{prefix}{name}.alpha": torch.tensor(alpha) for name in pairs}


def plain(m: Maker, *, prefix: str = "", middle: str = "") -> LoraFile:
    pairs = m.pairs()
    return m.file(peft(prefix or f"{m.component}.", pairs, middle), pairs)


def stored_as(m: Maker, dtype: torch.dtype, *, prefix: str = "") -> LoraFile:
    """Return the values that the type can hold are the meaning."""
    pairs = {
        path: Factors(pair.a.to(dtype).float(), pair.b.to(dtype).float())
        for path, pair in m.pairs().items()
    }
    tensors = peft(prefix or f"{m.component}.", pairs)
    return m.file({key: tensor.to(dtype) for key, tensor in tensors.items()}, pairs)


def with_header(m: Maker) -> LoraFile:
    pairs = {path: m.pair(m.shape(path)) for path in m.paths}
    header = {
        "r": RANK,
        "lora_alpha": 2,
        "alpha_pattern": {m.paths[0]: 6},
        "use_rslora": True,
        "target_modules": m.paths,
    }
    meant = {
        path: pair.times((6 if path == m.paths[0] else 2) / RANK**0.5)
        for path, pair in pairs.items()
    }
    return m.file(peft(f"{m.component}.", pairs), meant, header=header)


def flat(m: Maker, prefix: str, alpha: float | None = 2.0, **more: Any) -> LoraFile:
    pairs = m.pairs()
    return m.file(kohya(prefix, pairs, alpha), pairs, **more)


def odd_alpha(m: Maker) -> LoraFile:
    """In bfloat16 with one dimension, as some trainers save it."""
    made = flat(m, "lora_unet_")
    odd = {k: v.to(torch.bfloat16).view(1) for k, v in made.tensors.items() if k.endswith(".alpha")}
    return replace(made, tensors=made.tensors | odd)


def no_alpha(m: Maker) -> LoraFile:
    made = flat(m, "lora_unet_")
    zeros = {key: v * 0 for key, v in made.tensors.items() if key.endswith(".alpha")}
    return LoraFile(made.tensors | zeros, {}, refusal="no_effect")


def dotted_alpha(m: Maker, prefix: str) -> LoraFile:
    pairs = m.pairs()
    scaled = {path: pair.times(len(pair.a) / 2) for path, pair in pairs.items()}
    return m.file(downs(prefix, scaled) | alphas(prefix, pairs, 2.0), pairs)


def biased(m: Maker, *, prefix: str = "", alpha: float = 0.0) -> LoraFile:
    """PEFT's lora_bias: the scale applies to the biases, too."""
    pairs = {path: m.pair(m.shape(path)) for path in m.paths}
    biases = {path: m.bias(path) for path in m.paths}
    scale, header = 1.0, {}
    if alpha:
        scale = alpha / RANK
        header = {"r": RANK, "lora_alpha": alpha, "lora_bias": True, "target_modules": m.paths}
    prefix = prefix or f"{m.component}."
    tensors = peft(prefix, pairs)
    tensors |= {f"{prefix}{path}.lora_B.bias": bias for path, bias in biases.items()}
    changes = {
        path: Change(pair.delta * scale, biases[path] * scale) for path, pair in pairs.items()
    }
    return LoraFile(tensors, {m.component: changes}, header)


def dora(m: Maker, *, is_kohya: bool = False) -> LoraFile:
    pairs = m.pairs()
    lengths = {
        path: random_lengths(m.net.get_submodule(path).weight, index)
        for index, path in enumerate(pairs)
    }
    tensors = kohya("lora_unet_", pairs) if is_kohya else peft(f"{m.component}.", pairs)
    for path, length in lengths.items():
        if is_kohya:
            tensors[f"lora_unet_{path.replace('.', '_')}.dora_scale"] = length[:, None]
        else:
            tensors[f"{m.component}.{path}.lora_magnitude_vector"] = length
    changes = {path: Change(pair.delta, None, lengths[path]) for path, pair in pairs.items()}
    return LoraFile(tensors, {m.component: changes})


def loha(m: Maker, prefix: str) -> LoraFile:
    tensors, changes = {}, {}
    for path in m.paths:
        rows, columns = m.shape(path)
        one, two = m.pair((rows, columns), 2), m.pair((rows, columns), 2)
        name = prefix + path.replace(".", "_")
        halves = {"w1_a": one.b, "w1_b": one.a, "w2_a": two.b * 4, "w2_b": two.a * 4}
        tensors |= {f"{name}.hada_{key}": part for key, part in halves.items()}
        tensors[f"{name}.alpha"] = torch.tensor(1.0)
        changes[path] = Change(0.5 * one.delta * two.delta * 16)
    return LoraFile(tensors, {m.component: changes})


def lokr_parts(m: Maker, shape: Sequence[int], form: str) -> tuple[Tensors, Tensor]:
    """Return the factors of one matrix without a scale, and their product."""
    rows, columns = shape[0] // FACTOR, shape[1] // FACTOR
    parts: Tensors = {}
    if form == "both":
        one = m.pair((FACTOR, FACTOR), 1)
        left, parts = one.delta, {"lokr_w1_a": one.b, "lokr_w1_b": one.a}
    else:
        left = parts["lokr_w1"] = m.rand(FACTOR, FACTOR) * 0.5
    if form == "full":
        right = parts["lokr_w2"] = m.rand(rows, columns) * columns**-0.5
    else:
        two = m.pair((rows, columns), 1 if form == "both" else 2)
        right = two.delta
        parts |= {"lokr_w2_a": two.b, "lokr_w2_b": two.a}
    return parts, torch.kron(left, right)


def lokr(
    m: Maker, form: str, prefix: str, *, is_flat: bool = False, alpha: bool = True
) -> LoraFile:
    tensors, changes = {}, {}
    paths = [p for p in m.paths if not any(size % FACTOR for size in m.shape(p))]
    for path in paths:
        name = prefix + (path.replace(".", "_") if is_flat else path)
        parts, product = lokr_parts(m, m.shape(path), form)
        tensors |= {f"{name}.{key}": part for key, part in parts.items()}
        scale = 1.0
        if alpha:
            # LyCORIS ignores alpha where both factors are whole.
            tensors[f"{name}.alpha"] = torch.tensor(3.0)
            scale = {"full": 1.0, "factored": 1.5, "both": 3.0}[form]
        changes[path] = Change(product * scale)
    return LoraFile(tensors, {m.component: changes})


def lokr_header(m: Maker) -> LoraFile:
    """PEFT divides alpha by the rank of the configuration, whole factors too."""
    made = lokr(m, "full", f"{m.component}.", alpha=False)
    changes = made.changes[m.component]
    header = {
        "peft_type": "LOKR",
        "r": 64,
        "alpha": 32,
        "decompose_factor": FACTOR,
        "target_modules": sorted(changes),
    }
    halved = {path: Change(change.delta / 2) for path, change in changes.items()}
    return replace(made, changes={m.component: halved}, header=header)


def with_zeros(m: Maker) -> LoraFile:
    """Differences of norms and of biases that are zero, as extraction tools leave them."""
    made = plain(m, prefix="diffusion_model.")
    zeros = {
        "diffusion_model.some.norm.diff": torch.zeros(8),
        "diffusion_model.some.norm.diff_b": torch.zeros(8),
        f"diffusion_model.{m.paths[0]}.diff_b": torch.zeros(m.shape(m.paths[0])[0]),
    }
    return replace(made, tensors=made.tensors | zeros)


def text_parts(m: Maker) -> LoraFile:
    """Return the denoiser and each text encoder that diffusers can load LoRA into."""
    pipe = shared_pipeline(m.name)
    made = plain(m)
    changes = dict(made.changes)
    tensors = dict(made.tensors)
    for component in pipe._lora_loadable_modules:
        if not component.startswith("text_encoder"):
            continue
        net = getattr(pipe, component)
        paths = [
            p for p, part in net.named_modules() if isinstance(part, nn.Linear) and "proj" in p
        ]
        paths = [
            path for path in paths if path.endswith(("q_proj", "k_proj", "v_proj", "out_proj"))
        ]
        pairs = {path: m.pair(net.get_submodule(path).weight.shape) for path in paths}
        tensors |= peft(f"{component}.", pairs)
        changes[component] = {path: Change(pair.delta) for path, pair in pairs.items()}
    return LoraFile(tensors, changes)


# Broken files: a code for each.


def broken(m: Maker, kind: str) -> LoraFile:
    made = plain(m)
    tensors = dict(made.tensors)
    first = f"{m.component}.{m.paths[0]}"
    a = tensors[f"{first}.lora_A.weight"]
    if kind == "not_finite":
        tensors[f"{first}.lora_A.weight"] = a * torch.nan
    if kind == "incomplete_pair":
        del tensors[f"{first}.lora_B.weight"]
    if kind == "unknown_tensors":
        tensors[f"{m.component}.nowhere.lora_A.weight"] = a
    if kind == "wrong_shape":
        tensors[f"{first}.lora_A.weight"] = torch.ones(len(a), a.shape[1] + 8)
    if kind == "no_effect":
        tensors = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    if kind == "full_weights":
        tensors[f"{m.component}.some.norm.diff"] = torch.ones(8)
    if kind == "bias_tensors":
        tensors[f"{first}.lora_A.bias"] = torch.ones(len(a))
    if kind == "unserved_method":
        tensors[f"{first}.oft_blocks"] = torch.ones(2, 2, 2)
    return LoraFile(tensors, {}, refusal=kind)


BROKEN = (
    "not_finite",
    "incomplete_pair",
    "unknown_tensors",
    "wrong_shape",
    "no_effect",
    "full_weights",
    "bias_tensors",
    "unserved_method",
)
Build = Callable[[Maker], LoraFile]
COMMON: dict[str, Build] = {
    "diffusers": plain,
    "default": lambda m: plain(m, middle=".default"),
    "header": with_header,
    "bfloat16": lambda m: stored_as(m, torch.bfloat16),
    "float16": lambda m: stored_as(m, torch.float16),
    "float8_e4m3": lambda m: stored_as(m, torch.float8_e4m3fn),
    "float8_e5m2": lambda m: stored_as(m, torch.float8_e5m2),
    "float8-comfyui": lambda m: stored_as(m, torch.float8_e4m3fn, prefix="diffusion_model."),
    "peft": lambda m: plain(m, prefix="base_model.model."),
    "comfyui": lambda m: plain(m, prefix="diffusion_model."),
    "zeros": with_zeros,
    "kohya": lambda m: flat(m, "lora_unet_"),
    "kohya-no-alpha": lambda m: flat(m, "lora_unet_", None),
    "kohya-odd-alpha": odd_alpha,
    "kohya-alpha-0": no_alpha,
    "kohya-negative-alpha": lambda m: flat(m, "lora_unet_", -4.0, hangs=True),
    "kohya-component": lambda m: flat(m, f"lora_{m.component}_"),
    "down-alpha": lambda m: dotted_alpha(m, f"{m.component}."),
    "comfyui-down-alpha": lambda m: dotted_alpha(m, "diffusion_model."),
    "bias": biased,
    "bias-alpha": lambda m: biased(m, alpha=2.0),
    "bias-comfyui": lambda m: biased(m, prefix="diffusion_model."),
    "dora": dora,
    "dora-kohya": lambda m: dora(m, is_kohya=True),
    "loha": lambda m: loha(m, "lora_unet_"),
    "lycoris-loha": lambda m: loha(m, "lycoris_"),
    "lokr-header": lokr_header,
    "text": text_parts,
    **{
        f"lokr-{form}{end}": lambda m, form=form, prefix=prefix, is_flat=is_flat, alpha=alpha: lokr(
            m, form, prefix or f"{m.component}.", is_flat=is_flat, alpha=alpha
        )
        for form in ("full", "factored", "both")
        for end, prefix, is_flat, alpha in (
            ("", "", False, False),
            ("-comfyui", "diffusion_model.", False, True),
            ("-lycoris", "lycoris_", True, True),
            ("-kohya", "lora_unet_", True, True),
        )
    },
    **{f"broken-{kind}": lambda m, kind=kind: broken(m, kind) for kind in BROKEN},
}
