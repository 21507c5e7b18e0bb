"""Writers of quantised checkpoints: packed tensors of a linear beside the weight they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model_factory import save_hf_folder

Tensors = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Tensors, Tensor]]
"""Maps a weight [out, in] to tensors by the end of their names, and to the dequantised weight."""

GROUP = 32
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
BLOCK = (24, 40)  # Cuts the last blocks of the tiny models.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.091050036, 0.0]
    + [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
)
FP4 = torch.tensor([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]) / 12


@dataclass(frozen=True)
class Case:
    quantise: Quantise
    settings: dict[str, Any] = field(default_factory=dict)
    """quantization_config"""


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, n] into int32 [rows, n * bits / 32] as one stream of bits per row."""
    shifts = torch.arange(bits)
    stream = (codes.to(torch.int64)[:, :, None] >> shifts & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32))
    words = (stream.view(len(codes), -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def affine(
    weight: Tensor, bits: int, group_of: Tensor, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [out, in], and scale and zero point [out, groups]."""
    top = 2**bits - 1
    columns = [weight[:, group_of == group] for group in range(int(group_of.max()) + 1)]
    low = torch.stack([one.amin(1).clamp(max=0) for one in columns], 1)
    high = torch.stack([one.amax(1).clamp(min=0) for one in columns], 1)
    half = float(2 ** (bits - 1))
    scale = torch.maximum(-low, high) / half if symmetric else (high - low) / top
    zero = torch.full_like(scale, half) if symmetric else (-low / scale).round().clamp(1, top)
    scale = scale.half().float()
    codes = (weight / scale[:, group_of] + zero[:, group_of]).round().clamp(0, top)
    return codes, scale, zero


def groups_of(weight: Tensor, *, act_order: bool = False, size: int = GROUP) -> Tensor:
    found = torch.arange(weight.shape[1]) // size
    return found[weight.abs().sum(0).argsort().argsort()] if act_order else found


def dense_of(codes: Tensor, scale: Tensor, zero: Tensor, group_of: Tensor) -> Tensor:
    return (codes - zero[:, group_of]) * scale[:, group_of]


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    group_of = groups_of(weight)
    codes, scale, zero = affine(weight, 4, group_of, symmetric=False)

    def pack(values: Tensor) -> Tensor:
        return pack_bits(values.view(len(values), -1, 8)[:, :, AWQ_ORDER].flatten(1), 4)

    parts = {"qweight": pack(codes.t()), "qzeros": pack(zero.t()), "scales": scale.t().half()}
    return parts, dense_of(codes, scale, zero, group_of)


def gptq(
    weight: Tensor, *, bits: int = 4, version: int = 1, sym: bool = False, act_order: bool = False
) -> tuple[Tensors, Tensor]:
    group_of = groups_of(weight, act_order=act_order)
    codes, scale, zero = affine(weight, bits, group_of, symmetric=sym)
    parts = {
        "qweight": pack_bits(codes.t().t(), bits).t(),
        "qzeros": pack_bits(zero.t() - (2 - version), bits),
        "scales": scale.t().half(),
        "g_idx": group_of.int(),
    }
    return parts, dense_of(codes, scale, zero, group_of)


def packed(
    weight: Tensor, *, bits: int = 4, sym: bool = True, act_order: bool = False
) -> tuple[Tensors, Tensor]:
    group_of = groups_of(weight, act_order=act_order)
    codes, scale, zero = affine(weight, bits, group_of, symmetric=sym)
    parts = {
        "weight_packed": pack_bits(codes, bits),
        "weight_scale": scale.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        parts["weight_zero_point"] = pack_bits(zero.t(), bits).t()
    if act_order:
        parts["weight_g_idx"] = group_of.int()
    return parts, dense_of(codes, scale, zero, group_of)


def fp8(
    weight: Tensor,
    *,
    block: tuple[int, int] | None = None,
    name: str = "weight_scale",
    kind: str = "f32",
) -> tuple[Tensors, Tensor]:
    """`block`: None for the whole tensor; a row is (1, inputs)."""
    rows, columns = block or tuple(weight.shape)
    out, inputs = weight.shape
    columns = min(columns, inputs)
    padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -out % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, -1, columns)
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    if kind == "e8m0":
        exponent = scale.log2().ceil()
        scale, stored = exponent.exp2(), (exponent + 127).to(torch.uint8)
    else:
        stored = scale = scale.to(torch.bfloat16 if kind == "bf16" else torch.float32)
        scale = scale.float()
    codes = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    dense = (codes.float() * scale[:, None, :, None]).view_as(padded)[:out, :inputs]
    stored = stored.reshape(()) if block is None else stored
    return {"weight": codes.view_as(padded)[:out, :inputs], name: stored}, dense


def int8(weight: Tensor, *, size: int | None = None, sym: bool = True) -> tuple[Tensors, Tensor]:
    group_of = groups_of(weight, size=size or weight.shape[1])
    codes, scale, zero = affine(weight, 8, group_of, symmetric=sym)
    parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale.to(torch.float32)}
    if not sym:
        parts["weight_zero_point"] = (zero - 128).to(torch.int8)
    return parts, dense_of(codes, scale, zero, group_of)


def e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the nearest values, two per byte, and the values."""
    index = torch.bucketize(values.abs(), (E2M1[1:] + E2M1[:-1]) / 2)
    codes = (index + 8 * (values < 0)).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, E2M1[index] * torch.where(values < 0, -1, 1)


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    blocks = weight.view(len(weight), -1, 32)
    exponent = (blocks.abs().amax(-1) / 6).log2().ceil()
    bytes_, values = e2m1(blocks / exponent.exp2()[..., None])
    parts = {
        "weight_packed": bytes_.flatten(1),
        "weight_scale": (exponent + 127).to(torch.uint8),
    }
    return parts, (values * exponent.exp2()[..., None]).flatten(1)


def nvfp4(weight: Tensor, *, modelopt: bool) -> tuple[Tensors, Tensor]:
    blocks = weight.view(len(weight), -1, 16)
    whole = weight.abs().max() / (6 * FP8_MAX)
    scale = (blocks.abs().amax(-1) / 6 / whole).to(FP8)
    if modelopt:
        parts = {"weight_scale": scale, "weight_scale_2": whole}
        factor = scale.float() * whole
    else:
        inverse = (1 / whole).reshape(1)
        parts = {"weight_scale": scale, "weight_global_scale": inverse}
        factor = scale.float() / inverse
    bytes_, values = e2m1(blocks / factor[..., None])
    name = "weight" if modelopt else "weight_packed"
    return {name: bytes_.flatten(1), **parts}, (values * factor[..., None]).flatten(1)


def bnb4(weight: Tensor, *, kind: str = "nf4", double: bool = False) -> tuple[Tensors, Tensor]:
    table = NF4 if kind == "nf4" else torch.cat([FP4, -FP4])
    blocks = weight.flatten().view(-1, 64)
    absmax = blocks.abs().amax(1)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    parts: Tensors = {"weight.quant_map": table}
    if double:
        offset, linear = absmax.mean(), torch.linspace(-1, 1, 256)
        padded = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        nested = padded.abs().amax(1)
        index = ((padded / nested[:, None])[..., None] - linear).abs().argmin(-1)
        index = index.flatten()[: len(absmax)].to(torch.uint8)
        absmax = linear[index.int()] * nested.repeat_interleave(256)[: len(absmax)] + offset
        parts |= {"weight.absmax": index, "weight.nested_absmax": nested}
        parts["weight.nested_quant_map"] = linear
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = offset.item()
    else:
        parts["weight.absmax"] = absmax
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
    dense = (table[codes] * absmax[:, None]).view_as(weight)
    flat = codes.flatten().to(torch.uint8)
    parts["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
    content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts | {f"weight.quant_state.bitsandbytes__{kind}": content}, dense


def bnb8(weight: Tensor) -> tuple[Tensors, Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight * (127 / largest)[:, None]).round().to(torch.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * largest[:, None] * (1 / 127)


def hqq(weight: Tensor, *, bits: int = 4, axis: int = 1) -> tuple[Tensors, Tensor]:
    matrix = weight.reshape((-1, 64) if axis == 1 else (64, -1))
    low, high = matrix.amin(axis, keepdim=True), matrix.amax(axis, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    zero = -low / scale
    codes = (matrix / scale + zero).round().clamp(0, 2**bits - 1)
    parts = {
        "W_q": hqq_pack(codes, bits),
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor(weight.shape),
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "group_size": torch.tensor(64, dtype=torch.int32),
        "quant_scale": torch.tensor(0, dtype=torch.uint8),
    }
    return parts, ((codes - zero) * scale).view_as(weight)


def hqq_pack(codes: Tensor, bits: int) -> Tensor:
    """Pack parts of the rows above each other, the first part in the high bits."""
    number = 10 if bits == 3 else 8 // bits
    stored = torch.int32 if bits == 3 else torch.uint8
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % number)).to(stored)
    words = torch.zeros(len(padded) // number, codes.shape[1], dtype=stored)
    for index, part in enumerate(padded.chunk(number)):
        words |= part << bits * (number - 1 - index)
    return words


def args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """QuantizationArgs of compressed-tensors."""
    settings = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return settings | {"dynamic": False, "group_size": None} | more


def compressed(
    name: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


TOKEN_FP8, TOKEN_INT8 = (args(8, kind, "token", dynamic=True) for kind in ("float", "int"))
PACKED = args(4, "int", "group", group_size=GROUP)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
ROW = (1, 2**30)


def hqq_settings(bits: int, axis: int) -> dict[str, Any]:
    params = {"nbits": bits, "group_size": 64, "axis": axis, "view_as_float": False}
    quant = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": quant, "skip_modules": ["lm_head"]}


CASES: dict[str, Case] = {
    "fp8_block": Case(
        partial(fp8, block=BLOCK, name="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
    ),
    "fp8_block_e8m0": Case(
        partial(fp8, block=BLOCK, name="weight_scale_inv", kind="e8m0"),
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"},
    ),
    "fp8_static": Case(fp8, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm": Case(
        partial(fp8, block=ROW), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    ),
    "modelopt_fp8": Case(
        fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    ),
    "ct_fp8_channel": Case(
        partial(fp8, block=ROW, kind="bf16"),
        compressed("float-quantized", args(8, "float", "channel"), TOKEN_FP8),
    ),
    "ct_fp8_tensor": Case(fp8, compressed("float-quantized", args(8, "float", "tensor"))),
    "ct_fp8_block": Case(
        partial(fp8, block=BLOCK),
        compressed("float-quantized", args(8, "float", "block", block_structure=list(BLOCK))),
    ),
    "ct_mxfp8": Case(
        partial(fp8, block=(1, 32), kind="e8m0"),
        compressed("mxfp8-quantized", args(8, "float", "group", group_size=32)),
    ),
    "ct_int8": Case(int8, compressed("int-quantized", args(8, "int", "channel"), TOKEN_INT8)),
    "ct_int8_group": Case(
        partial(int8, size=GROUP, sym=False),
        compressed("int-quantized", args(8, "int", "group", group_size=GROUP, symmetric=False)),
    ),
    "awq": Case(awq, AWQ),
    "gptq": Case(partial(gptq, sym=True), GPTQ | {"sym": True}),
    "gptq_asymmetric": Case(gptq, GPTQ),
    "gptq_v2": Case(partial(gptq, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq_act_order": Case(partial(gptq, act_order=True), GPTQ | {"desc_act": True}),
    "gptq_8_bits": Case(partial(gptq, bits=8, sym=True), GPTQ | {"bits": 8}),
    "gptq_3_bits": Case(partial(gptq, bits=3, sym=True), GPTQ | {"bits": 3}),
    "gptq_2_bits": Case(partial(gptq, bits=2, sym=True), GPTQ | {"bits": 2}),
    "packed": Case(packed, compressed("pack-quantized", PACKED)),
    "packed_asymmetric": Case(
        partial(packed, sym=False), compressed("pack-quantized", PACKED | {"symmetric": False})
    ),
    "packed_act_order": Case(partial(packed, act_order=True), compressed("pack-quantized", PACKED)),
    "packed_3_bits": Case(
        partial(packed, bits=3, sym=False),
        compressed("pack-quantized", PACKED | {"num_bits": 3, "symmetric": False}),
    ),
    "packed_8_bits": Case(
        partial(packed, bits=8), compressed("pack-quantized", PACKED | {"num_bits": 8})
    ),
    "mxfp4": Case(
        mxfp4, compressed("mxfp4-pack-quantized", args(4, "float", "group", group_size=32))
    ),
    "nvfp4": Case(
        partial(nvfp4, modelopt=False),
        compressed("nvfp4-pack-quantized", args(4, "float", "tensor_group", group_size=16)),
    ),
    "modelopt_nvfp4": Case(
        partial(nvfp4, modelopt=True), {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    ),
    "nf4": Case(bnb4, BNB4),
    "nf4_double": Case(partial(bnb4, double=True), BNB4 | {"bnb_4bit_use_double_quant": True}),
    "fp4": Case(partial(bnb4, kind="fp4"), BNB4 | {"bnb_4bit_quant_type": "fp4"}),
    "bnb_int8": Case(bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "hqq": Case(hqq, hqq_settings(4, 1)),
    "hqq_axis_0": Case(partial(hqq, axis=0), hqq_settings(4, 0)),
    "hqq_3_bits": Case(partial(hqq, bits=3), hqq_settings(3, 1)),
}


def is_linear(name: str) -> bool:
    return name.endswith("proj.weight")


def quantise_folder(
    folder: Path, case: Case, *, wanted: Callable[[str], bool] = is_linear
) -> Tensors:
    """Quantise the linears of a dense folder in place; return the dequantised state."""
    file = folder / "model.safetensors"
    stored: Tensors = {}
    dense: Tensors = {}
    for name, tensor in load_file(file).items():
        if not wanted(name):
            stored[name] = dense[name] = tensor
            continue
        parts, dense[name] = case.quantise(tensor.float())
        module = name.removesuffix("weight")
        stored |= {module + part: value.contiguous() for part, value in parts.items()}
    save_file({name: one.clone() for name, one in stored.items()}, file, metadata={"format": "pt"})
    configure(folder, quantization_config=case.settings)
    return dense


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))


def quantised_model(model: Any, folder: Path, case: Case) -> Path:
    """Save the model quantised, and give the model the dequantised weights."""
    save_hf_folder(model, folder)
    dense = quantise_folder(folder, case)
    missing, unexpected = model.load_state_dict(dense, strict=False)
    assert not unexpected
    assert all(name == "lm_head.weight" for name in missing)
    model.tie_weights()
    return folder
