"""The PEFT types that are not served, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnservedGroup:
    """Types that are refused for one reason."""

    reason: str
    """Completes "<type> ..."."""
    fix: str
    names: tuple[str, ...]


CONVERT_TO_LORA = (
    "Convert it with PEFT's convert_to_lora, which approximates it, or train a LORA adapter."
)
RETRAIN = "Train a LORA adapter."

GROUPS = (
    UnservedGroup(
        "prepends trained virtual tokens or keys and values, which change the positions of a "
        "prompt, and no weight of the base",
        RETRAIN,
        (
            "ADAPTION_PROMPT",
            "CARTRIDGE",
            "CPT",
            "MULTITASK_PROMPT_TUNING",
            "P_TUNING",
            "PREFIX_TUNING",
            "PROMPT_TUNING",
        ),
    ),
    UnservedGroup(
        "mixes several adapters by a trained router",
        "Serve its adapters, and give their weights in the request.",
        ("POLY", "XLORA"),
    ),
    UnservedGroup(
        "computes a change that is not linear in the input of the layer",
        RETRAIN,
        ("LILY", "SHADOW"),
    ),
    UnservedGroup(
        "makes fixed random positions again from a seed, which torch does not promise to be equal "
        "in all its versions, so that the saved file does not determine the result",
        CONVERT_TO_LORA,
        ("FOURIERFT", "WAVEFT"),
    ),
    UnservedGroup(
        "has a linear delta that is not computed here yet",
        CONVERT_TO_LORA,
        (
            "ADAMSS",
            "C3A",
            "DEFT",
            "DELORA",
            "FROD",
            "GLORA",
            "GRALORA",
            "HIRA",
            "OSF",
            "PEANUT",
            "PSOFT",
            "PVERA",
            "RANDLORA",
            "ROAD",
            "SHIRA",
            "SUPERTUNING",
            "TINYLORA",
            "UNILORA",
            "VBLORA",
        ),
    ),
    UnservedGroup(
        "replaces rows of the embedding, which is served as a field of LORA only",
        "Train a LORA adapter with trainable_token_indices.",
        ("TRAINABLE_TOKENS",),
    ),
    UnservedGroup(
        "is the former name of MISS, with other tensors",
        "Convert it with the script that PEFT has for it, or train a MISS adapter.",
        ("BONE",),
    ),
)
UNSERVED: dict[str, UnservedGroup] = {name: group for group in GROUPS for name in group.names}
