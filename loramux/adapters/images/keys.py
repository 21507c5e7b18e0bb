"""Splits the name of a tensor into the name of its module and the role of the tensor there."""

from __future__ import annotations

import re
from collections.abc import Set
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
    LOKR_W1 = "lokr_w1"
    LOKR_W1_A = "lokr_w1_a"
    LOKR_W1_B = "lokr_w1_b"
    LOKR_W2 = "lokr_w2"
    LOKR_W2_A = "lokr_w2_a"
    LOKR_W2_B = "lokr_w2_b"
    LOKR_T2 = "lokr_t2"
    """The core of w2 of a convolution, between its two matrices."""
    DIFF = "diff"
    """The difference of a whole weight."""
    BIAS = "bias"
    """The bias of lora_B, to which the scale of the pair applies."""
    DIFF_BIAS = "diff_b"
    """The difference of a bias, without a scale."""
    # Roles that are not served.
    HADA_TUCKER = "hada_t"
    FULL = "full"
    A_BIAS = "a_bias"
    OFT = "oft"


LOHA = (Role.HADA_W1_A, Role.HADA_W1_B, Role.HADA_W2_A, Role.HADA_W2_B)
LOKR_FIRST = (frozenset({Role.LOKR_W1}), frozenset({Role.LOKR_W1_A, Role.LOKR_W1_B}))
LOKR_SECOND = (
    frozenset({Role.LOKR_W2}),
    frozenset({Role.LOKR_W2_A, Role.LOKR_W2_B}),
    frozenset({Role.LOKR_W2_A, Role.LOKR_W2_B, Role.LOKR_T2}),
)
LOKR = frozenset[Role]().union(*LOKR_FIRST, *LOKR_SECOND)
BIASES = frozenset({Role.BIAS, Role.DIFF_BIAS})
_WHOLE = ({Role.A, Role.B}, {Role.A, Role.B, Role.MID}, {*LOHA}, {Role.DIFF})
_SUFFIXES: tuple[tuple[str, Role], ...] = (
    (r"\.alpha", Role.ALPHA),
    (r"\.lora_(?:A|down)(?:\.default)?\.weight", Role.A),
    (r"\.lora_(?:B|up)(?:\.default)?\.weight", Role.B),
    (r"\.lora_mid\.weight", Role.MID),
    # Old diffusers: to_q_lora.down, to_q.lora.down, to_q.lora_linear_layer.down; XLabs: .down.
    (r"(?:_lora|\.lora|\.lora_linear_layer)?\.down\.weight", Role.A),
    (r"(?:_lora|\.lora|\.lora_linear_layer)?\.up\.weight", Role.B),
    *((rf"\.{role}", role) for role in (*LOHA, *sorted(LOKR))),
    (r"\.hada_t[12]", Role.HADA_TUCKER),
    (r"\.dora_scale", Role.DORA),
    (r"\.lora_magnitude_vector(?:\.default)?(?:\.weight)?", Role.MAGNITUDE),
    (r"\.diff", Role.DIFF),
    (r"\.diff_b", Role.DIFF_BIAS),
    (r"\.lora_(?:B|up)(?:\.default)?\.bias", Role.BIAS),
    (r"\.lora_(?:A|down)(?:\.default)?\.bias", Role.A_BIAS),
    (r"\.(?:[wb]_norm|set_weight|set_bias)", Role.FULL),
    (r"\.oft_(?:blocks|diag|R)(?:\.weight)?", Role.OFT),
)
_PATTERNS = tuple((re.compile(f"(.+?)(?:{suffix})"), role) for suffix, role in _SUFFIXES)


def split_key(key: str) -> tuple[str, Role] | None:
    """Return (module name, role); None for a tensor without a known role."""
    for pattern, role in _PATTERNS:
        found = pattern.fullmatch(key)
        if found is not None:
            return found[1], role
    return None


def is_whole(roles: Set[Role]) -> bool:
    """Whether the tensors of a module say how it changes."""
    factors = roles & {Role.A, Role.B, Role.MID, Role.DIFF, *LOHA, *LOKR}
    if not factors:
        return Role.DIFF_BIAS in roles and Role.BIAS not in roles
    first = factors & frozenset[Role]().union(*LOKR_FIRST)
    second = factors & frozenset[Role]().union(*LOKR_SECOND)
    is_lokr = first in LOKR_FIRST and second in LOKR_SECOND and first | second == factors
    return is_lokr or factors in _WHOLE
