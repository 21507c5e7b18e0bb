"""Finds the scales that a quantiser folded into a checkpoint, by comparing it with the original."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from loramux.adapters.packed.extras import ATTENTION_NORM, MLP_NORM
from loramux.adapters.rescale import FoldedScales, Site
from loramux.errors import UnsupportedModel
from loramux.models.architectures import DecoderConfig, parse_config
from loramux.models.folder import read_config, weight_files
from loramux.models.quantised.checkpoint import QuantisedCheckpoint
from loramux.models.tensor_files import Read
from loramux.types.quantisation import Quantisation
from loramux.types.vision import text_name

NOT_QUANTISED = Quantisation("none", (), None)
# Norm weights of both files may be rounded to bfloat16.
ROUNDING = 2**-7
# A norm weight near zero has no ratio; its scale is 1.
SMALLEST = 1e-6
# A scale of rows is taken if it explains this much of the squared difference of the weights.
EXPLAINED = 0.4
# Cosine of a row before and after quantisation: 0.9 with 2 bits, 0 for another model.
LEAST_COSINE = 0.7
READERS = {
    ATTENTION_NORM: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    + ("self_attn.qkv_proj",),
    MLP_NORM: ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
}
"""The projections that may read each norm."""


class NamedWeights:
    """The dense weights of a folder by name; each is read when it is asked for."""

    def __init__(self, folder: Path, config: DecoderConfig, stack: ExitStack) -> None:
        found = config.quantisation or NOT_QUANTISED
        files = QuantisedCheckpoint(weight_files(folder), found, stack, torch.device("cpu"))
        self._reads: dict[str, Read] = {}
        for name, read in files.weights():
            path = text_name(name)
            if path is not None:
                self._reads[path if path.startswith("model.") else f"model.{path}"] = read

    def __contains__(self, name: str) -> bool:
        return name in self._reads

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._reads:
            raise UnsupportedModel(f"The weights lack {name}.")
        return self._reads[name]().float()


def find_folded_scales(served: Path, original: Path, config: DecoderConfig) -> FoldedScales | None:
    """Compare two folders of one model; None if nothing is folded.

    The scales of a norm are the quotient of its weights, and those of rows are fitted to the
    dequantised weight. Raises UnsupportedModel if the original is another model.
    """
    original_config = parse_config(read_config(original))
    shape = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    different = [n for n in shape if getattr(config, n) != getattr(original_config, n)]
    if different:
        raise UnsupportedModel(
            f"{original} is not the original of this base: {', '.join(different)} differ."
        )
    if original_config.quantisation is not None:
        raise UnsupportedModel(f"{original} is quantised itself: give the unquantised model.")
    with ExitStack() as stack:
        pair = _Pair(
            NamedWeights(served, config, stack), NamedWeights(original, original_config, stack)
        )
        sites = _Sites()
        for layer in range(config.num_layers):
            _compare_layer(layer, pair, config, sites)
    return sites.found()


class _Pair:
    def __init__(self, served: NamedWeights, original: NamedWeights) -> None:
        self.served = served
        self.original = original

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        return self.served[name], self.original[name]


class _Sites:
    """Collects the scales of all layers."""

    def __init__(self) -> None:
        self.inputs: dict[Site, Tensor] = {}
        self.outputs: dict[Site, Tensor] = {}
        self.norms: dict[Site, Tensor] = {}

    def found(self) -> FoldedScales | None:
        parts = self.inputs, self.outputs, self.norms
        digest = hashlib.sha256()
        for scales in parts:
            for site, scale in sorted(scales.items()):
                digest.update(repr(site).encode() + scale.numpy().tobytes())
        if not any(parts):
            return None
        return FoldedScales(self.inputs, self.outputs, self.norms, digest.hexdigest())


def _compare_layer(layer: int, pair: _Pair, config: DecoderConfig, sites: _Sites) -> None:
    prefix = f"model.layers.{layer}."
    names = {ATTENTION_NORM: config.norm_names.attention, MLP_NORM: config.norm_names.mlp}
    for norm, name in names.items():
        scale = None if name is None else _norm_scale(pair, f"{prefix}{name}.weight", config)
        if scale is not None:
            sites.norms[layer, norm] = scale
        for reader in READERS[norm]:
            if f"{prefix}{reader}.weight" in pair.original:
                projection = reader.rpartition(".")[2]
                if scale is not None:
                    sites.inputs[layer, projection] = scale
                _check_same_model(pair, f"{prefix}{reader}.weight", scale)
    for rows in _folded_rows(layer, pair, config, sites):
        linear, projection, start, scale = rows
        total = torch.ones(_width(linear, config))
        total[start : start + len(scale)] = scale
        sites.outputs[layer, linear] = total
        whole = projection in ("qkv_proj", "gate_up_proj")
        sites.outputs[layer, projection] = total if whole else scale
        sites.inputs[layer, "down_proj" if linear == "gate_up" else "o_proj"] = scale


def _norm_scale(pair: _Pair, name: str, config: DecoderConfig) -> Tensor | None:
    plus = 1.0 if config.norm_plus_one else 0.0
    served, original = (weight + plus for weight in pair.of(name))
    if torch.allclose(served, original, rtol=ROUNDING, atol=0):
        return None
    has_ratio = (served.abs() > SMALLEST) & (original.abs() > SMALLEST)
    return torch.where(has_ratio, original / served, 1.0)


def _width(linear: str, config: DecoderConfig) -> int:
    if linear == "gate_up":
        return 2 * config.intermediate_size
    return config.q_size + 2 * config.kv_size


def _folded_rows(
    layer: int, pair: _Pair, config: DecoderConfig, sites: _Sites
) -> Iterator[tuple[str, str, int, Tensor]]:
    """Yield fused linear, projection, first row in the linear, and scales of folded rows.

    Rows of up_proj go into down_proj; those of v_proj into o_proj, unless heads share them.
    """
    starts = {"gate_up": config.intermediate_size, "qkv": config.q_size + config.kv_size}
    places = [("gate_up", "mlp", ("up_proj", "gate_up_proj"))]
    if config.num_kv_heads == config.num_heads:
        places.append(("qkv", "self_attn", ("v_proj", "qkv_proj")))
    for linear, block, projections in places:
        for projection in projections:
            name = f"model.layers.{layer}.{block}.{projection}.weight"
            if name not in pair.original:
                continue
            first = starts[linear] if projection in ("gate_up_proj", "qkv_proj") else 0
            served, original = (weight[first:] for weight in pair.of(name))
            scale = _row_scale(served, original, sites.inputs.get((layer, projection)))
            if scale is not None:
                yield linear, projection, starts[linear], scale


def _row_scale(served: Tensor, original: Tensor, scale: Tensor | None) -> Tensor | None:
    """Fit one factor to each row, where the noise of codes is even; None: rows are unchanged."""
    expected = original if scale is None else original * scale
    along = (expected * served).sum(1)
    if bool((along <= 0).any()):
        return None
    fitted = expected.square().sum(1) / along
    before = (served - expected).square().sum()
    after = (served - expected / fitted[:, None]).square().sum()
    return fitted if after < (1 - EXPLAINED) * before else None


def _check_same_model(pair: _Pair, name: str, scale: Tensor | None) -> None:
    served, original = pair.of(name)
    expected = original if scale is None else original * scale
    # Rows may have a scale as well: compare their directions.
    cosine = torch.nn.functional.cosine_similarity(served, expected, dim=1)
    if float(cosine.median()) < LEAST_COSINE:
        raise UnsupportedModel(
            f"{name} of the original is another weight than that of the served model: give the "
            "model that the checkpoint was quantised from."
        )
