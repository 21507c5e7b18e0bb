"""Translates tensor names of wrappers and of older tools into those that PEFT writes today."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.errors import AdapterRefused

PREFIX = "base_model.model."
WRAPPER = re.compile(
    r"(?:^module\.)+"
    r"|(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
REPEATED_PREFIX = re.compile(rf"^(?:{re.escape(PREFIX)}){{2,}}")
# lora_A.<name of the adapter>.weight, and lora_A without .weight.
NAMED_HALF = re.compile(r"(?P<half>\.lora_[AB])\.(?P<name>[^.]+)\.weight$")
BARE_HALF = re.compile(r"(?P<half>\.lora_[AB])$")
BARE_DECODER = re.compile(r"^layers\.(?=\d+\.)")
TEXT_MODEL = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?(?=layers\.\d+\.)")


@dataclass(frozen=True, slots=True)
class Renaming:
    names: dict[str, str]
    """Each old name with its new one."""
    changes: tuple[str, ...]
    """A sentence for each kind of change."""
    moves_modules: bool
    """Whether modules have another path than before."""


def translate_names(names: Iterable[str]) -> Renaming:
    """Return PEFT's names; unknown ones stay as they are. Refuses several adapters in one file."""
    old = list(names)
    changes: dict[str, None] = {}
    adapters = sorted({match["name"] for name in old if (match := NAMED_HALF.search(name))})
    if len(adapters) > 1:
        raise AdapterRefused(
            RefusalCode.DUPLICATE_TENSORS,
            f"The file holds several adapters: {name_some(adapters, limit=8)}.",
            fix="Save one of them with save_pretrained(..., selected_adapters=[name]).",
        )
    renamed = {name: _translate(name, changes) for name in old}
    new = list(renamed.values())
    if len(set(new)) != len(new):
        repeated = sorted({name for name in new if new.count(name) > 1})
        raise AdapterRefused(
            RefusalCode.DUPLICATE_TENSORS,
            f"The file holds tensors under two names: {name_some(repeated)}.",
            fix="Save the adapter again with one adapter name.",
        )
    moved = [(_path(before), _path(after)) for before, after in renamed.items()]
    return Renaming(renamed, tuple(changes), any(before != after for before, after in moved))


def _path(name: str) -> str:
    return name.partition(".lora_")[0].removeprefix(PREFIX)


def _translate(name: str, changes: dict[str, None]) -> str:
    def apply(pattern: re.Pattern[str], new: str, text: str, change: str) -> str:
        result, count = pattern.subn(new, text)
        if count:
            changes[change] = None
        return result

    name = apply(WRAPPER, "", name, "Removed the name parts of training wrappers.")
    name = apply(REPEATED_PREFIX, PREFIX, name, f"Removed a repeated {PREFIX!r}.")
    if match := NAMED_HALF.search(name):
        label = match["name"]
        name = apply(
            NAMED_HALF, r"\g<half>.weight", name, f"Removed the adapter name {label!r} from names."
        )
    name = apply(BARE_HALF, r"\g<half>.weight", name, "Added '.weight' to tensor names.")
    path = name.removeprefix(PREFIX)
    if path == name:
        changes[f"Added {PREFIX!r} to tensor names."] = None
    path = apply(
        TEXT_MODEL, "model.", path, "Renamed the layers of a 'language_model' to 'model.layers'."
    )
    path = apply(BARE_DECODER, "model.layers.", path, "Renamed 'layers' to 'model.layers'.")
    return PREFIX + path
