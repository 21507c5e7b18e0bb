"""Names of the text part of a vision model, in checkpoints and in adapters."""

from __future__ import annotations

import re

TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of the text part, and those of a text model in their place.

Releases of transformers name the same modules in different ways.
"""
_VISION = re.compile(
    r"(?:model\.)?(?:visual|vision_tower|vision_model|multi_modal_projector|embed_vision)\."
)


def text_name(name: str) -> str | None:
    """Return a tensor's or module's name in the text model; None for the image encoder's."""
    if _VISION.match(name):
        return None
    for prefix, of_text in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return of_text + name.removeprefix(prefix)
    return name
