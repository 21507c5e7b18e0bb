"""Stable codes of refusals that only adapters of image models have."""

from __future__ import annotations

from enum import StrEnum

from loramux.adapters.images.keys import Role
from loramux.adapters.peft.refusals import RefusalCode
from loramux.errors import AdapterRefused


class ImageRefusal(StrEnum):
    OTHER_FAMILY = "other_family"
    UNSERVED_METHOD = "unserved_method"
    AMBIGUOUS_NAME = "ambiguous_name"
    AMBIGUOUS_FILE = "ambiguous_file"
    FILE_MISSING = "file_missing"
    CONFLICTING_ALPHA = "conflicting_alpha"


_TRAIN = "Train it as LoRA, LoCon, LoHa or LoKr."
_UNSERVED = {
    Role.HADA_TUCKER: (ImageRefusal.UNSERVED_METHOD, "a LoHa in Tucker form", _TRAIN),
    Role.OFT: (ImageRefusal.UNSERVED_METHOD, "an OFT rotation", _TRAIN),
    Role.FULL: (RefusalCode.FULL_WEIGHTS, "a part of the base in full", _TRAIN),
    Role.A_BIAS: (
        RefusalCode.BIAS_TENSORS,
        "a bias of lora_A",
        "Save it as PEFT does, with biases of lora_B alone.",
    ),
}


def refuse_unserved(key: str, role: Role) -> None:
    if role in _UNSERVED:
        code, what, fix = _UNSERVED[role]
        raise AdapterRefused(code, f"{key} is {what}, which is not served.", fix=fix)
