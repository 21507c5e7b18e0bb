"""Splits the name of a tensor into the name of its module and the role of the tensor there."""

from __future__ import annotations

import re
from enum import StrEnum


class Role(StrEnum):
    A = "a"
    B = "b"
    MID = "mid"
    """The k x k convolution between two 1 x 1 convolutions (LoCon in Tucker form)."""
    ALPHA = "alpha"
    HADA_W1_A = "hada_w1_a"
    HADA_W1_B = "hada_w1_b"
    HADA_W2_A = "hada_w2_a"
    HADA_W2_B = "hada_w2_b"
    DORA = "dora"
    """Magnitudes of kohya and LyCORIS: per output row, or per input column."""
    MAGNITUDE = "magnitude"
    """Magnitudes of PEFT, per output row."""
    # Roles that are not served.
    HADA_TUCKER = "hada_t"
    LOKR = "lokr"
    FULL = "full"
    BIAS = "bias"
    OFT = "oft"


LOHA = (Role.HADA_W1_A, Role.HADA_W1_B, Role.HADA_W2_A, Role.HADA_W2_B)
_SUFFIXES: tuple[tuple[str, Role], ...] = (
    (r"\.alpha", Role.ALPHA),
    (r"\.lora_(?:A|down)(?:\.default)?\.weight", Role.A),
    (r"\.lora_(?:B|up)(?:\.default)?\.weight", Role.B),
    (r"\.lora_mid\.weight", Role.MID),
    # Old diffusers: to_q_lora.down, to_q.lora.down, to_q.lora_linear_layer.down; XLabs: .down.
    (r"(?:_lora|\.lora|\.lora_linear_layer)?\.down\.weight", Role.A),
    (r"(?:_lora|\.lora|\.lora_linear_layer)?\.up\.weight", Role.B),
    (r"\.hada_w1_a", Role.HADA_W1_A),
    (r"\.hada_w1_b", Role.HADA_W1_B),
    (r"\.hada_w2_a", Role.HADA_W2_A),
    (r"\.hada_w2_b", Role.HADA_W2_B),
    (r"\.hada_t[12]", Role.HADA_TUCKER),
    (r"\.lokr_(?:w[12](?:_[ab])?|t2)", Role.LOKR),
    (r"\.dora_scale", Role.DORA),
    (r"\.lora_magnitude_vector(?:\.default)?(?:\.weight)?", Role.MAGNITUDE),
    (r"\.diff|\.w_norm|\.set_weight", Role.FULL),
    (r"\.diff_b|\.b_norm|\.set_bias|\.lora_[AB](?:\.default)?\.bias", Role.BIAS),
    (r"\.oft_(?:blocks|diag|R)(?:\.weight)?", Role.OFT),
)
_PATTERNS = tuple((re.compile(f"(.+?)(?:{suffix})"), role) for suffix, role in _SUFFIXES)


def split_key(key: str) -> tuple[str, Role] | None:
    """Returns (module name, role); None for a tensor without a known role."""
    for pattern, role in _PATTERNS:
        found = pattern.fullmatch(key)
        if found is not None:
            return found[1], role
    return None
