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


_CONVERT = "Convert it to LoRA, for example with the resize scripts of kohya-ss."
_UNSERVED = {
    Role.LOKR: (ImageRefusal.UNSERVED_METHOD, "a LoKr factor", _CONVERT),
    Role.HADA_TUCKER: (ImageRefusal.UNSERVED_METHOD, "a LoHa in Tucker form", _CONVERT),
    Role.OFT: (ImageRefusal.UNSERVED_METHOD, "an OFT rotation", _CONVERT),
    Role.FULL: (RefusalCode.FULL_WEIGHTS, "a full difference of weights", _CONVERT),
    Role.BIAS: (RefusalCode.BIAS_TENSORS, "a bias", "Train without biases."),
}


def refuse_unserved(key: str, role: Role) -> None:
    if role in _UNSERVED:
        code, what, fix = _UNSERVED[role]
        raise AdapterRefused(code, f"{key} is {what}, which is not served.", fix=fix)
