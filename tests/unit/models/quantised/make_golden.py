"""Writes golden/: packed tensors, and the weights that the formats' own libraries read from them.

    python -m tests.unit.models.quantised.make_golden AUTOAWQ_SOURCE GPTQMODEL_SOURCE HQQ_SOURCE

Needs compressed-tensors and bitsandbytes. Of the other libraries, whose kernels do not install on a
CPU, one function each is taken from its source: `awq/utils/packing_utils.py`,
`gptqmodel/nn_modules/qlinear/__init__.py` (PackableQuantLinear) and `hqq/core/quantize.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.quantised_factory import BLOCK, CASES, Tensors

GOLDEN = Path(__file__).parent / "golden"
OUT, INPUTS = 48, 64


def compressed_tensors(parts: Tensors, settings: dict[str, Any]) -> Tensor:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    parsed = QuantizationConfig.model_validate(settings)
    (scheme,) = parsed.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(parsed.format)
    exact = dict(parts)
    # It computes in the dtype of the scale.
    if exact["weight_scale"].dtype in (torch.float16, torch.bfloat16):
        exact["weight_scale"] = exact["weight_scale"].float()
    return compressor.decompress(exact, scheme)["weight"].float()


def nv_fp4(parts: Tensors, settings: dict[str, Any]) -> Tensor:
    """Call the parts of `decompress`, which computes in bfloat16, in float32."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    (scheme,) = QuantizationConfig.model_validate(settings).config_groups.values()
    packed = parts["weight_packed"]
    codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], dtype=torch.float32)
    return dequantize(
        x_q=codes,
        scale=parts["weight_scale"].float(),
        args=scheme.weights,
        global_scale=parts["weight_global_scale"],
        dtype=torch.float32,
    )


def fine_grained(parts: Tensors, settings: dict[str, Any]) -> Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    del settings
    convert = Fp8Dequantize(None)
    return convert._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)


def bitsandbytes4(parts: Tensors, settings: dict[str, Any]) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    del settings
    state = {name.removeprefix("weight."): t for name, t in parts.items() if name != "weight"}
    found = QuantState.from_dict(state, torch.device("cpu"))
    return dequantize_4bit(parts["weight"], found)


def bitsandbytes8(parts: Tensors, settings: dict[str, Any]) -> Tensor:
    from bitsandbytes.functional import int8_vectorwise_dequant

    del settings
    return int8_vectorwise_dequant(parts["weight"], parts["SCB"])


def auto_awq(source: Path) -> Callable[[Tensors, dict[str, Any]], Tensor]:
    spec = importlib.util.spec_from_file_location("packing", source / "awq/utils/packing_utils.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def read(parts: Tensors, settings: dict[str, Any]) -> Tensor:
        scales = parts["scales"].float()
        size = settings["group_size"]
        return module.dequantize_gemm(parts["qweight"], parts["qzeros"], scales, 4, size).t()

    return read


def gptq_model(source: Path) -> Callable[[Tensors, dict[str, Any]], Tensor]:
    """Take two methods of PackableQuantLinear, whose module needs the library's kernels."""
    text = (source / "gptqmodel/nn_modules/qlinear/__init__.py").read_text()
    (node,) = (
        one
        for one in ast.parse(text).body
        if isinstance(one, ast.ClassDef) and one.name == "PackableQuantLinear"
    )
    wanted = ("_init_wf_unsqueeze_buffers", "dequantize_weight", "_dequantize_from_codes")
    node.body = [one for one in node.body if getattr(one, "name", "") in wanted]
    node.bases = [ast.Name("object", ast.Load())]
    tree = ast.fix_missing_locations(ast.Module([node], []))
    scope: dict[str, Any] = {
        "t": torch,
        "_torch_right_shift": torch.bitwise_right_shift,
        "_torch_left_shift": torch.bitwise_left_shift,
    }
    exec(compile(tree, "gptqmodel", "exec"), scope)

    def read(parts: Tensors, settings: dict[str, Any]) -> Tensor:
        bits = settings["bits"]
        zeros = parts["qzeros"]
        if settings.get("checkpoint_format") != "gptq_v2":
            zeros = zeros + int("".join("1".rjust(bits, "0") for _ in range(32 // bits)), 2)
        one = scope["PackableQuantLinear"]()
        fields = {
            "planar": False, "enable_wf_unsqueeze": True, "bits": bits, "pack_dtype_bits": 32,
            "pack_factor": 32 // bits, "maxq": 2**bits - 1, "dequant_dtype": torch.int32,
            "qzeros": zeros, "qweight": parts["qweight"], "scales": parts["scales"].float(),
            "g_idx": parts["g_idx"], "_buffers": {}, "_wf_device": lambda: "cpu",
            "register_buffer": lambda name, value, persistent: setattr(one, name, value),
        }  # fmt: skip
        for name, value in fields.items():
            setattr(one, name, value)
        return one.dequantize_weight().t()

    return read


def hqq_library(source: Path) -> Callable[[Tensors, dict[str, Any]], Tensor]:
    sys.path.insert(0, str(source))
    sys.modules.setdefault("termcolor", SimpleNamespace(colored=lambda text, *_: text))  # type: ignore[arg-type]
    from hqq.core.quantize import Quantizer

    def read(parts: Tensors, settings: dict[str, Any]) -> Tensor:
        params = settings["quant_config"]["weight_quant_params"]
        meta = {
            "compute_dtype": torch.float32,
            "packing": Quantizer.bit_to_packing[params["nbits"]],
            "view_as_float": False,
            "nbits": params["nbits"],
            "group_size": params["group_size"],
            "axis": params["axis"],
            "shape": torch.Size(parts["shape"].tolist()),
            "zero": parts["zero"],
            "scale": parts["scale"],
        }
        return Quantizer.dequantize(parts["W_q"], meta)

    return read


def main(awq: Path, gptq: Path, hqq: Path) -> None:
    readers: dict[str, tuple[str, Any]] = {"awq": ("AutoAWQ", auto_awq(awq))}
    for name in ("gptq", "gptq_asymmetric", "gptq_v2", "gptq_act_order", "gptq_8_bits"):
        readers[name] = "GPTQModel", gptq_model(gptq)
    readers["gptq_2_bits"] = "GPTQModel", gptq_model(gptq)
    for name in ("hqq", "hqq_axis_0", "hqq_3_bits"):
        readers[name] = "hqq", hqq_library(hqq)
    for name in ("nf4", "nf4_double", "fp4"):
        readers[name] = f"bitsandbytes {version('bitsandbytes')}", bitsandbytes4
    readers["bnb_int8"] = f"bitsandbytes {version('bitsandbytes')}", bitsandbytes8
    label = f"compressed-tensors {version('compressed-tensors')}"
    for name in ("ct_fp8_channel", "ct_fp8_tensor", "ct_fp8_block", "ct_mxfp8", "ct_int8"):
        readers[name] = label, compressed_tensors
    for name in ("ct_int8_group", "packed", "packed_asymmetric", "packed_3_bits"):
        readers[name] = label, compressed_tensors
    for name in ("packed_8_bits", "mxfp4"):
        readers[name] = label, compressed_tensors
    readers["nvfp4"] = label, nv_fp4
    readers["fp8_block"] = f"transformers {version('transformers')}", fine_grained
    readers["fp8_block_e8m0"] = readers["fp8_block"]
    GOLDEN.mkdir(exist_ok=True)
    settings = {}
    for seed, (name, (library, read)) in enumerate(readers.items()):
        generator = torch.Generator().manual_seed(seed)
        # transformers takes whole blocks only.
        shape = (2 * BLOCK[0], 2 * BLOCK[1]) if name.startswith("fp8_block") else (OUT, INPUTS)
        weight = torch.randn(shape, generator=generator)
        weight *= torch.rand(shape[1], generator=generator).mul(2).exp()
        parts, _ = CASES[name].quantise(weight)
        expected = read(parts, CASES[name].settings)
        stored = {f"m.{part}": one.contiguous() for part, one in parts.items()}
        save_file({**stored, "expected": expected.contiguous()}, GOLDEN / f"{name}.safetensors")
        settings[name] = {"library": library, "quantization_config": CASES[name].settings}
    (GOLDEN / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
