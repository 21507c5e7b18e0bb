"""Chooses the dtype of weights and KV cache."""

from __future__ import annotations

from pathlib import Path

import torch

from loramux.errors import UnsupportedModel

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# Any of these sets suffices; /proc/cpuinfo spells sve_bf16 without the underscore.
FAST_BFLOAT16_FEATURES = (
    frozenset({"amx_bf16"}),
    frozenset({"avx512_bf16"}),
    frozenset({"bf16", "i8mm"}),
    frozenset({"sve_bf16"}),
    frozenset({"svebf16"}),
)


# Up to this size float32 is faster on a CPU than bfloat16, even with AMX (8 adapters, batches of 8
# and 32 tokens): 1.3 times at 360 million parameters; at a billion 0.6 and 0.9 times.
SMALL_MODEL = 500_000_000


def resolve_dtype(
    name: str, device: torch.device | str = "cpu", *, num_parameters: int
) -> torch.dtype:
    """Resolve `auto` to bfloat16 where it is faster, else to float32; parse other names."""
    if name == "auto":
        if torch.device(device).type != "cpu":
            return torch.bfloat16
        is_small = num_parameters <= SMALL_MODEL
        return torch.float32 if is_small or not cpu_has_fast_bfloat16() else torch.bfloat16
    if name not in DTYPES:
        raise UnsupportedModel(
            f"dtype {name!r} is not supported; valid values: auto, {', '.join(DTYPES)}."
        )
    return DTYPES[name]


def cpu_has_fast_bfloat16() -> bool:
    """Whether matrix multiplication in bfloat16 beats float32 on this processor."""
    features = cpu_features()
    return any(needed <= features for needed in FAST_BFLOAT16_FEATURES)


def cpu_features() -> frozenset[str]:
    query = getattr(torch.cpu, "get_capabilities", None)
    if query is not None:
        return frozenset(name for name, has in query().items() if has is True)
    cpuinfo = Path("/proc/cpuinfo")
    return features_in(cpuinfo.read_text()) if cpuinfo.is_file() else frozenset()


def features_in(cpuinfo: str) -> frozenset[str]:
    """Return the flags (x86) or Features (ARM) of the first processor."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = (text for key, _, text in lines if key.strip() in ("flags", "Features"))
    return frozenset(next(flags, "").split())
