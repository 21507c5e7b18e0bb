"""Parses adapter_config.json into the fields that decide what the adapter computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from loramux.adapters.peft.activation import ONE_AT_A_TIME, read_invocation
from loramux.adapters.peft.fields import (
    BASE_CHANGING_INITIALIZATIONS,
    HARMLESS,
    HONOURED,
    PLAIN_INITIALIZATIONS,
    REFUSED,
    Unsupported,
)
from loramux.adapters.peft.folder import find_file, open_real, refusing_os_errors
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.errors import AdapterRefused

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
ALL_LINEAR = "all-linear"
DEFAULT_RANK = 8
DEFAULT_ALPHA: float = 8
NO_NAMES: tuple[str, ...] | str = ()

Value = TypeVar("Value")


class TargetFields(Protocol):
    """The fields by which PEFT chooses modules of the base, the same for all its types."""

    @property
    def target_modules(self) -> tuple[str, ...] | str: ...

    @property
    def exclude_modules(self) -> tuple[str, ...] | str: ...

    @property
    def layers_to_transform(self) -> tuple[int, ...]: ...

    @property
    def layers_pattern(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftLoraConfig:
    """The fields of PEFT's LoraConfig that serving honours; absent ones have PEFT's defaults."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]
    """(pattern, rank) in the order of the file: the first pattern that matches a module applies."""
    alpha_pattern: tuple[tuple[str, float], ...]
    target_modules: tuple[str, ...] | str
    """A tuple of names, or one regular expression, or "all-linear"."""
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...]
    """The layers that are adapted; empty means all layers."""
    layers_pattern: tuple[str, ...]
    invocation_tokens: tuple[int, ...] = ()
    """Tokens of an aLoRA, which acts from their last occurrence in the prompt on."""
    use_dora: bool = False
    lora_bias: bool = False
    """Whether lora_B has a bias."""
    target_parameters: tuple[str, ...] = ()
    """Names of fused experts and routers."""
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(name of a module, its tokens whose rows are trained)"""
    ensure_weight_tying: bool = False
    """A LoRA of a tied embedding is one of the head too; the file has the tensors of both."""
    base_model_name: str | None
    """The base that PEFT recorded; it is not part of the CID."""
    task_type: str | None
    """The task that PEFT recorded; it is not part of the CID."""

    def canonical(self) -> dict[str, object]:
        """Return the form that the CID covers: equal for configs that compute the same."""
        fields: dict[str, object] = {
            "peft_type": "LORA",
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "use_rslora": self.use_rslora,
            "rank_pattern": [list(pair) for pair in self.rank_pattern],
            "alpha_pattern": [list(pair) for pair in self.alpha_pattern],
            "target_modules": _as_json(self.target_modules),
            "exclude_modules": _as_json(self.exclude_modules),
            "layers_to_transform": list(self.layers_to_transform),
            "layers_pattern": list(self.layers_pattern) if self.layers_to_transform else [],
        }
        if self.invocation_tokens:
            fields["alora_invocation_tokens"] = list(self.invocation_tokens)
        if self.use_dora:
            fields["use_dora"] = True
        if self.lora_bias:
            fields["lora_bias"] = True
        if self.target_parameters:
            fields["target_parameters"] = list(self.target_parameters)
        if self.modules_to_save:
            fields["modules_to_save"] = list(self.modules_to_save)
        if self.trainable_token_indices:
            fields["trainable_token_indices"] = {
                name: list(token_ids) for name, token_ids in self.trainable_token_indices
            }
        return fields

    @property
    def only_alone(self) -> str:
        """Why the adapter cannot be part of a sum or have a weight; empty: it can."""
        return ONE_AT_A_TIME if self.invocation_tokens else ""


def _as_json(names: tuple[str, ...] | str) -> object:
    return names if isinstance(names, str) else list(names)


def read_config(folder: Path) -> PeftLoraConfig:
    """Read and check the config of an adapter folder; raise AdapterRefused."""
    return parse_config(decode_json(read_config_bytes(folder)))


def require_config(folder: Path) -> Path:
    path = find_file(folder, CONFIG_NAME)
    if path is None:
        raise AdapterRefused(
            RefusalCode.CONFIG_MISSING,
            f"The folder has no {CONFIG_NAME}.",
            fix="Give the folder that PEFT's save_pretrained wrote.",
        )
    return path


def read_config_bytes(folder: Path) -> bytes:
    path = require_config(folder)
    with refusing_os_errors(path), open_real(path) as file:
        return file.read(MAX_CONFIG_BYTES + 1)


def decode_json(text: bytes) -> dict[str, object]:
    if len(text) > MAX_CONFIG_BYTES:
        raise AdapterRefused(
            RefusalCode.CONFIG_TOO_LARGE,
            f"{CONFIG_NAME} is larger than {MAX_CONFIG_BYTES} bytes.",
            fix="Give the file that PEFT's save_pretrained wrote.",
        )
    try:
        fields = json.loads(text.decode("utf-8"))
        # JSON can escape an unpaired surrogate, which UTF-8 cannot encode.
        json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(
            RefusalCode.CONFIG_NOT_JSON,
            f"{CONFIG_NAME} is not JSON: {error}.",
            fix="Give the file that PEFT's save_pretrained wrote.",
        ) from error
    if not isinstance(fields, dict):
        raise AdapterRefused(
            RefusalCode.CONFIG_NOT_JSON,
            f"{CONFIG_NAME} does not hold a JSON object.",
            fix="Give the file that PEFT's save_pretrained wrote.",
        )
    return fields


def parse_config(fields: Mapping[str, object]) -> PeftLoraConfig:
    check_peft_type(fields.get("peft_type"))
    check_unsupported(fields)
    check_unknown(fields)
    check_initialization(fields.get("init_lora_weights", True))
    config = PeftLoraConfig(
        r=read(fields, "r", rank, DEFAULT_RANK),
        lora_alpha=read(fields, "lora_alpha", number, DEFAULT_ALPHA),
        use_rslora=read(fields, "use_rslora", flag, False),
        rank_pattern=read(fields, "rank_pattern", pattern_of(rank), ()),
        alpha_pattern=read(fields, "alpha_pattern", pattern_of(number), ()),
        target_modules=read(fields, "target_modules", names_or_pattern, NO_NAMES),
        exclude_modules=read(fields, "exclude_modules", names_or_pattern, NO_NAMES),
        layers_to_transform=read(fields, "layers_to_transform", layer_indices, ()),
        layers_pattern=read(fields, "layers_pattern", one_or_more_strings, ()),
        invocation_tokens=read_invocation(fields),
        use_dora=read(fields, "use_dora", flag, False),
        lora_bias=read(fields, "lora_bias", flag, False),
        target_parameters=read(fields, "target_parameters", sorted_names, ()),
        modules_to_save=read(fields, "modules_to_save", sorted_names, ()),
        trainable_token_indices=read(fields, "trainable_token_indices", token_indices, ()),
        ensure_weight_tying=read(fields, "ensure_weight_tying", flag, False),
        base_model_name=read(fields, "base_model_name_or_path", optional_string, None),
        task_type=read(fields, "task_type", optional_string, None),
    )
    if not config.target_parameters or config.target_modules:
        check_targets(config, fields)
    read(fields, "bias", bias_choice, "none")
    if config.use_dora and config.lora_bias:
        raise AdapterRefused(
            RefusalCode.BAD_VALUE,
            "use_dora and lora_bias are both set, which PEFT does not support.",
            fix="Set the one that the adapter was trained with.",
        )
    return config


def check_peft_type(peft_type: object) -> None:
    if peft_type != "LORA":
        raise AdapterRefused(
            RefusalCode.NOT_LORA,
            f"peft_type is {peft_type!r}, not LORA.",
            fix="Give a LORA adapter; some other types can be served, and not merged or converted.",
        )


def check_unsupported(
    fields: Mapping[str, object], refused: Mapping[str, Unsupported] = REFUSED
) -> None:
    found = [
        (name, rule)
        for name, rule in refused.items()
        if name in fields and not rule.is_neutral(fields[name])
    ]
    if found:
        effects = "; ".join(f"{name}, which {rule.effect}" for name, rule in found)
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            f"The config uses features that are not supported yet: {effects}.",
            fix=" ".join(dict.fromkeys(rule.fix for _, rule in found)),
        )


def check_unknown(
    fields: Mapping[str, object],
    known: Set[str] = HONOURED | HARMLESS.keys() | REFUSED.keys(),
) -> None:
    blank: tuple[object, ...] = (None, "", [], {})
    unknown = [
        name
        for name, value in fields.items()
        if name not in known and value is not False and value not in blank
    ]
    if unknown:
        raise AdapterRefused(
            RefusalCode.UNKNOWN_FIELD,
            f"The config sets fields of unknown meaning: {name_some(sorted(unknown), limit=8)}.",
            fix="Remove them if they do not change the result; otherwise it cannot be served.",
        )


def check_initialization(start: object) -> None:
    if start is None or isinstance(start, bool):
        return
    if not isinstance(start, str):
        raise wrong_type("init_lora_weights", "true, false or a name", start)
    name = start.lower()
    if name.startswith(BASE_CHANGING_INITIALIZATIONS):
        raise AdapterRefused(
            RefusalCode.CHANGES_BASE,
            f"init_lora_weights is {start!r}: the adapter was trained on a changed copy of the "
            "base, so it would compute a different result on the original base.",
            fix="Turn it into a plain LoRA: `loramux convert FOLDER --initial INITIAL_ADAPTER "
            "--out NEW_FOLDER`, or PEFT's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...).",
        )
    if name not in PLAIN_INITIALIZATIONS:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            f"init_lora_weights is {start!r}, which may have changed the base's weights.",
            fix="Set it to true if the base was left as it is.",
        )


def check_targets(config: TargetFields, fields: Mapping[str, object]) -> None:
    """Refuses combinations that LoraConfig refuses too, and targets that PEFT would guess."""
    if not config.target_modules:
        raise AdapterRefused(
            RefusalCode.NO_TARGETS,
            "target_modules is not set.",
            fix="Write into adapter_config.json the modules that the adapter was trained on.",
        )
    layer_fields = [
        name for name in ("layers_to_transform", "layers_pattern") if fields.get(name) is not None
    ]
    if isinstance(config.target_modules, str) and layer_fields:
        raise AdapterRefused(
            RefusalCode.BAD_VALUE,
            f"{layer_fields[0]} cannot be combined with a target_modules that is one string.",
            fix="Make target_modules a list, or name the layers in its pattern.",
        )
    if config.layers_pattern and fields.get("layers_to_transform") is None:
        raise AdapterRefused(
            RefusalCode.BAD_VALUE,
            "layers_pattern is set without layers_to_transform.",
            fix="Set layers_to_transform, or remove layers_pattern.",
        )


def read(
    fields: Mapping[str, object], name: str, parse: Callable[[str, object], Value], default: Value
) -> Value:
    """Return the parsed field, or the default if it is absent or null."""
    value = fields.get(name)
    return default if value is None else parse(name, value)


def wrong_type(name: str, expected: str, value: object) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.WRONG_TYPE,
        f"{name} must be {expected}, found {json.dumps(value)[:100]}.",
        fix=f"Correct it in {CONFIG_NAME}.",
    )


def bad_value(name: str, expected: str, value: object) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.BAD_VALUE,
        f"{name} must be {expected}, found {value!r}.",
        fix=f"Correct it in {CONFIG_NAME}.",
    )


def rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(name, "an integer", value)
    if not 1 <= value <= 2**31:
        raise bad_value(name, "1 or more", value)
    return value


def number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(name, "a number", value)
    if not abs(value) <= 2**53 or not math.isfinite(value):
        raise bad_value(name, "a finite number of a sensible size", value)
    return value


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value


def optional_string(name: str, value: object) -> str | None:
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    return value or None


def strings(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise wrong_type(name, "a list of strings", value)
    return tuple(value)


def one_or_more_strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value else ()
    return strings(name, value)


def names_or_pattern(name: str, value: object) -> tuple[str, ...] | str:
    """Return names sorted and without repeats, because PEFT turns a list into a set."""
    if isinstance(value, str):
        return ALL_LINEAR if value.lower() == ALL_LINEAR else value
    return tuple(sorted(set(strings(name, value))))


def sorted_names(name: str, value: object) -> tuple[str, ...]:
    return tuple(sorted(set(strings(name, value))))


def bias_choice(name: str, value: object) -> str:
    """Return which biases were trained; the file tells which biases there are."""
    choices = ("none", "all", "lora_only")
    if value not in choices:
        raise bad_value(name, f"one of {', '.join(choices)}", value)
    return str(value)


def token_indices(name: str, value: object) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the tokens by module; a list is of the embedding."""
    listed = value if isinstance(value, dict) else {"embed_tokens": value}
    found = []
    for module, items in sorted(listed.items()):
        if not isinstance(items, list) or not all(type(item) is int for item in items):
            raise wrong_type(name, "a list of token ids, or one for each module", value)
        if any(item < 0 for item in items) or len(set(items)) < len(items):
            raise bad_value(name, "different token ids from 0", items[:20])
        if items:
            found.append((module, tuple(items)))
    return tuple(found)


def layer_indices(name: str, value: object) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [value]
    indices = {item for item in items if type(item) is int}
    if not all(type(item) is int for item in items):
        raise wrong_type(name, "an integer or a list of integers", value)
    if any(not 0 <= index < 2**31 for index in indices):
        raise bad_value(name, "layer numbers from 0", value)
    return tuple(sorted(indices))


def pattern_of(
    parse: Callable[[str, object], Value],
) -> Callable[[str, object], tuple[tuple[str, Value], ...]]:
    def parse_pattern(name: str, value: object) -> tuple[tuple[str, Value], ...]:
        if not isinstance(value, dict):
            raise wrong_type(name, "an object from module patterns to numbers", value)
        return tuple((key, parse(f"{name}[{key!r}]", item)) for key, item in value.items())

    return parse_pattern
