"""Linears of decoder layers, from the shapes of projections."""

from __future__ import annotations

from collections.abc import Mapping

from loramux.types.model import ATTENTION_BLOCK, MLP_BLOCK, LinearSpec

PROJECTIONS_OF = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
}
LINEAR_NAMES = tuple(PROJECTIONS_OF)
ATTENTION_SITES = ("qkv", "o")


def specs_of(
    shapes: Mapping[str, tuple[int, int]], *, biased: tuple[str, ...] = ()
) -> tuple[LinearSpec, ...]:
    """Linears that compute projections of these (inputs, outputs)."""
    made = []
    for name, known in PROJECTIONS_OF.items():
        found = tuple(projection for projection in known if projection in shapes)
        if found:
            made.append(
                LinearSpec(
                    name,
                    shapes[found[0]][0],
                    found,
                    tuple(shapes[projection][1] for projection in found),
                    ATTENTION_BLOCK if name in ATTENTION_SITES else MLP_BLOCK,
                    found[0] in biased,
                    is_added=name in ("o", "down"),
                    is_gated=name == "gate_up",
                )
            )
    return tuple(made)
