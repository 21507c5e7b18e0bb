"""Classifies the tensors of an adapter's weights file by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import WEIGHTS_NAME, TensorEntry
from loramux.errors import AdapterRefused
from loramux.types.vision import text_name


class Role(Enum):
    """What a tensor is to the module that its name holds."""

    LORA_A = auto()
    LORA_B = auto()
    LORA_BIAS = auto()
    MAGNITUDE = auto()
    EMBEDDING_A = auto()
    EMBEDDING_B = auto()
    TOKENS = auto()
    """Rows for some tokens, which replace those of the embedding or the head."""
    WEIGHT = auto()
    BIAS = auto()
    SAVED_WEIGHT = auto()
    """The weight of a module in modules_to_save; PEFT writes it as WEIGHT, and rarely twice."""
    SAVED_BIAS = auto()
    FROZEN_WEIGHT = auto()
    """The weight of the base below a LoRA, trained tokens or a saved module."""
    FROZEN_BIAS = auto()
    """The bias of the base below a saved module; nothing reads it."""
    TRAINING = auto()
    """Only training reads it."""


_PREFIX = r"base_model\.model\.(?P<path>.+?)"
_MODEL_PREFIX = "base_model.model."
_ADAPTER = r"(?:\.default)?"
LORA_NAME = re.compile(rf"{_PREFIX}\.lora_(?P<half>[AB]){_ADAPTER}\.weight")
# The first pattern that matches the whole name decides.
_ROLES: tuple[tuple[re.Pattern[str], Role], ...] = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (rf"{_PREFIX}\.lora_A{_ADAPTER}\.weight", Role.LORA_A),
        (rf"{_PREFIX}\.lora_B{_ADAPTER}\.weight", Role.LORA_B),
        (rf"{_PREFIX}\.lora_B{_ADAPTER}\.bias", Role.LORA_BIAS),
        (rf"{_PREFIX}\.lora_magnitude_vector{_ADAPTER}(?:\.weight)?", Role.MAGNITUDE),
        (rf"{_PREFIX}\.lora_embedding_A{_ADAPTER}", Role.EMBEDDING_A),
        (rf"{_PREFIX}\.lora_embedding_B{_ADAPTER}", Role.EMBEDDING_B),
        (rf"{_PREFIX}\.token_adapter\.trainable_tokens_delta{_ADAPTER}", Role.TOKENS),
        (rf"(?P<path>.+)\.token_adapter\.trainable_tokens_original{_ADAPTER}", Role.TRAINING),
        (rf"(?P<path>.+)\.lora_velora_embed{_ADAPTER}", Role.TRAINING),
        (
            rf"{_PREFIX}\.(?:token_adapter\.base_layer|base_layer|original_module)\.weight",
            Role.FROZEN_WEIGHT,
        ),
        (rf"{_PREFIX}\.original_module\.bias", Role.FROZEN_BIAS),
        # bias='all' and 'lora_only' train the bias of the base.
        (rf"{_PREFIX}\.base_layer\.bias", Role.BIAS),
        (rf"{_PREFIX}\.modules_to_save{_ADAPTER}\.weight", Role.SAVED_WEIGHT),
        (rf"{_PREFIX}\.modules_to_save{_ADAPTER}\.bias", Role.SAVED_BIAS),
        (r"base_model\.model\.(?P<path>(?:(?!\.lora_).)+)\.weight", Role.WEIGHT),
        (r"base_model\.model\.(?P<path>(?:(?!\.lora_).)+)\.bias", Role.BIAS),
    )
)
# Adapters of a model without a head, such as an embedding model, lack the name of its inner model.
_OF_BARE_MODEL = re.compile(r"layers\.\d+\.|(?:norm|embed_tokens)$")
_COPIES = {Role.SAVED_WEIGHT: Role.WEIGHT, Role.SAVED_BIAS: Role.BIAS}


@dataclass(frozen=True, slots=True)
class FileTensors:
    """The tensors of a weights file by role and module path."""

    by_role: dict[Role, dict[str, TensorEntry]]
    unused: tuple[str, ...]
    of_vision: tuple[str, ...] = ()
    """Tensors for the image encoder of a vision model; text does not pass through it."""

    def of(self, role: Role) -> dict[str, TensorEntry]:
        return self.by_role.get(role, {})


def classify(entries: Iterable[TensorEntry]) -> FileTensors:
    """Refuses names of unknown meaning, and two names for one tensor."""
    by_role: dict[Role, dict[str, TensorEntry]] = {}
    foreign: list[str] = []
    of_vision: list[str] = []
    for entry in entries:
        name = text_tensor_name(entry.name)
        if name is None:
            of_vision.append(entry.name)
            continue
        found = _role_of(name)
        if found is None:
            foreign.append(entry.name)
            continue
        path, role = found
        other = by_role.setdefault(role, {}).setdefault(path, entry)
        if other is not entry:
            raise AdapterRefused(
                RefusalCode.DUPLICATE_TENSORS,
                f"{other.name} and {entry.name} are the same tensor under two names.",
                fix="Save the adapter again with one adapter name.",
            )
    if foreign:
        raise AdapterRefused(
            RefusalCode.UNKNOWN_TENSORS,
            f"The file holds tensors of unknown meaning: {name_some(sorted(foreign))}.",
            fix="PEFT's names look like base_model.model.<module>.lora_A.weight; `loramux convert` "
            "translates those of older tools.",
        )
    if not by_role:
        raise AdapterRefused(
            RefusalCode.NO_TENSORS, f"{WEIGHTS_NAME} has no tensors.", fix="Save it again."
        )
    unused = [entry.name for entry in by_role.pop(Role.TRAINING, {}).values()]
    unused += [entry.name for entry in by_role.pop(Role.FROZEN_BIAS, {}).values()]
    for copy, role in _COPIES.items():
        for path, entry in by_role.pop(copy, {}).items():
            if by_role.setdefault(role, {}).setdefault(path, entry) is not entry:
                unused.append(entry.name)
    return FileTensors(by_role, (*unused, *of_vision), tuple(of_vision))


def text_tensor_name(name: str) -> str | None:
    """Return the name that PEFT gives the tensor on a text model; None for an image encoder's."""
    if not name.startswith(_MODEL_PREFIX):
        return name
    path = text_name(name.removeprefix(_MODEL_PREFIX))
    return None if path is None else _MODEL_PREFIX + path


def _role_of(name: str) -> tuple[str, Role] | None:
    for pattern, role in _ROLES:
        match = pattern.fullmatch(name)
        if match is not None:
            path = match["path"]
            return (f"model.{path}" if _OF_BARE_MODEL.match(path) else path), role
    return None
