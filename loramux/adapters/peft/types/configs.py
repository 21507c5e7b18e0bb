"""Parses the configs of PEFT types other than LORA; without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Protocol

from loramux.adapters.peft.config import (
    ALL_LINEAR,
    DEFAULT_ALPHA,
    NO_NAMES,
    PeftLoraConfig,
    TargetFields,
    bad_value,
    check_targets,
    check_unknown,
    check_unsupported,
    decode_json,
    flag,
    layer_indices,
    names_or_pattern,
    number,
    one_or_more_strings,
    optional_string,
    parse_config,
    pattern_of,
    rank,
    read,
    read_config_bytes,
    wrong_type,
)
from loramux.adapters.peft.fields import NOTHING_LISTED, Unsupported
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.types.unserved import UNSERVED
from loramux.errors import AdapterRefused

Fields = Mapping[str, object]
Ranks = tuple[tuple[str, int], ...]
Alphas = tuple[tuple[str, float], ...]
NO_RANKS: Ranks = ()
NO_ALPHAS: Alphas = ()
NO_INDICES: tuple[int, ...] = ()
NO_STRINGS: tuple[str, ...] = ()

NO_LAYERS = frozenset({"layers_pattern", "layers_to_transform"})
# The Cayley series is summed term by term.
MAX_CAYLEY_TERMS = 1000
# PEFT changed the series then; files of older versions mean the former one.
CAYLEY_SERIES_SINCE = (0, 18)


class AdapterConfig(TargetFields, Protocol):
    """What other code reads of the config of an adapter of any PEFT type."""

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        """The tokens from which on an aLoRA acts; empty for other adapters."""
        ...

    @property
    def base_model_name(self) -> str | None: ...

    @property
    def task_type(self) -> str | None: ...

    @property
    def only_alone(self) -> str:
        """Why the config excludes sums and weights; empty: it does not."""
        ...

    def canonical(self) -> dict[str, object]:
        """Return the form that the CID covers: equal for configs that compute the same."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeConfig:
    """The fields that all types have; each type adds those that change what it computes."""

    peft_type: ClassVar[str]
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields of the type that change no result of a trained adapter."""
    absent: ClassVar[frozenset[str]] = frozenset()
    """Common fields that PEFT's config of the type lacks, and would ignore."""

    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    base_model_name: str | None
    task_type: str | None

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        return ()

    @property
    def only_alone(self) -> str:
        return ""

    def canonical(self) -> dict[str, object]:
        made: dict[str, object] = {"peft_type": self.peft_type}
        for field in fields(self):
            if field.name not in ("base_model_name", "task_type"):
                made[field.name] = _as_json(getattr(self, field.name))
        if not self.layers_to_transform:
            made["layers_pattern"] = []
        return made


def _as_json(value: object) -> object:
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class LohaConfig(TypeConfig):
    peft_type: ClassVar[str] = "LOHA"
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"init_weights", "module_dropout", "rank_dropout", "use_effective_conv2d"}
    )

    r: int
    alpha: float
    rank_pattern: Ranks
    alpha_pattern: Alphas


@dataclass(frozen=True, slots=True, kw_only=True)
class LokrConfig(TypeConfig):
    peft_type: ClassVar[str] = "LOKR"
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "init_weights",
            "module_dropout",
            "rank_dropout",
            "rank_dropout_scale",
            "use_effective_conv2d",
        }
    )

    r: int
    alpha: float
    rank_pattern: Ranks
    alpha_pattern: Alphas
    decompose_both: bool
    decompose_factor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaLoraConfig(TypeConfig):
    peft_type: ClassVar[str] = "ADALORA"
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "beta1",
            "beta2",
            "deltaT",
            "fan_in_fan_out",
            "init_lora_weights",
            "lora_dropout",
            "megatron_core",
            "orth_reg_weight",
            "qalora_group_size",
            "r",
            "target_r",
            "tfinal",
            "tinit",
            "total_step",
        }
    )

    init_r: int
    lora_alpha: float
    ranks: Ranks
    """The rank that training left to each parameter that `rank_pattern` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VeraConfig(TypeConfig):
    peft_type: ClassVar[str] = "VERA"
    absent: ClassVar[frozenset[str]] = frozenset({"exclude_modules"})
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"d_initial", "fan_in_fan_out", "init_weights", "projection_prng_key", "vera_dropout"}
    )

    r: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ia3Config(TypeConfig):
    peft_type: ClassVar[str] = "IA3"
    absent: ClassVar[frozenset[str]] = NO_LAYERS
    harmless: ClassVar[frozenset[str]] = frozenset({"fan_in_fan_out", "init_ia3_weights"})

    feedforward_modules: tuple[str, ...] | str
    """Modules whose input is scaled: ends of paths, or one regular expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeftConfig(TypeConfig):
    peft_type: ClassVar[str] = "BEFT"
    absent: ClassVar[frozenset[str]] = NO_LAYERS | {"exclude_modules"}
    harmless: ClassVar[frozenset[str]] = frozenset({"init_weights"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LnTuningConfig(TypeConfig):
    peft_type: ClassVar[str] = "LN_TUNING"
    absent: ClassVar[frozenset[str]] = NO_LAYERS


@dataclass(frozen=True, slots=True, kw_only=True)
class OftConfig(TypeConfig):
    peft_type: ClassVar[str] = "OFT"
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"fan_in_fan_out", "init_weights", "module_dropout"}
    )

    r: int
    """Number of blocks; 0: it follows from the block size."""
    oft_block_size: int
    block_share: bool
    coft_eps: float | None
    """Bound of the rotation; None without `coft`."""
    cayley_terms: int
    """Terms of the Cayley series; 0: the exact Cayley transform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoftConfig(TypeConfig):
    peft_type: ClassVar[str] = "BOFT"
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"boft_dropout", "fan_in_fan_out", "init_weights"}
    )

    boft_block_size: int
    boft_block_num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HraConfig(TypeConfig):
    peft_type: ClassVar[str] = "HRA"
    harmless: ClassVar[frozenset[str]] = frozenset({"init_weights"})

    r: int
    apply_gs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MissConfig(TypeConfig):
    peft_type: ClassVar[str] = "MISS"
    harmless: ClassVar[frozenset[str]] = frozenset({"miss_dropout"})

    r: int
    variant: str
    """"", "bat" or "mini"."""
    mini_r: int
    """The columns that "mini" repeats over the output; 0 in other variants."""


COMMON_FIELDS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "peft_type",
        "peft_version",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
REFUSED = {
    "bias": Unsupported(
        "trains bias terms of the base", "Train it with bias='none'.", (None, "none")
    ),
    "modules_to_save": Unsupported(
        "replaces whole modules of the base, such as embeddings or the output head",
        "Train it with modules_to_save=None.",
        NOTHING_LISTED,
    ),
    "trainable_token_indices": Unsupported(
        "replaces rows of the embedding", "Train the adapter without it.", NOTHING_LISTED
    ),
}


def count_or_zero(name: str, value: object) -> int:
    return 0 if type(value) is int and value == 0 else rank(name, value)


def any_integer(name: str, value: object) -> int:
    if type(value) is not int:
        raise wrong_type(name, "an integer", value)
    if not abs(value) <= 2**31:
        raise bad_value(name, "an integer of a sensible size", value)
    return value


def common(given: Fields) -> dict[str, object]:
    """Return the arguments of TypeConfig, checked."""
    return {
        "target_modules": read(given, "target_modules", names_or_pattern, NO_NAMES),
        "exclude_modules": read(given, "exclude_modules", names_or_pattern, NO_NAMES),
        "layers_to_transform": read(given, "layers_to_transform", layer_indices, NO_INDICES),
        "layers_pattern": read(given, "layers_pattern", one_or_more_strings, NO_STRINGS),
        "base_model_name": read(given, "base_model_name_or_path", optional_string, None),
        "task_type": read(given, "task_type", optional_string, None),
    }


def lycoris(given: Fields) -> dict[str, object]:
    return {
        "r": read(given, "r", rank, 8),
        "alpha": read(given, "alpha", number, DEFAULT_ALPHA),
        "rank_pattern": read(given, "rank_pattern", pattern_of(rank), NO_RANKS),
        "alpha_pattern": read(given, "alpha_pattern", pattern_of(number), NO_ALPHAS),
    }


def lokr(given: Fields) -> dict[str, object]:
    return lycoris(given) | {
        "decompose_both": read(given, "decompose_both", flag, False),
        "decompose_factor": read(given, "decompose_factor", any_integer, -1),
    }


def adalora(given: Fields) -> dict[str, object]:
    return {
        "init_r": read(given, "init_r", rank, 12),
        "lora_alpha": read(given, "lora_alpha", number, DEFAULT_ALPHA),
        "ranks": read(given, "rank_pattern", pattern_of(kept_ranks), NO_RANKS),
    }


def kept_ranks(name: str, value: object) -> int:
    if not isinstance(value, list) or not all(isinstance(item, bool) for item in value):
        raise wrong_type(name, "a list of true and false", value)
    return sum(value)


def vera(given: Fields) -> dict[str, object]:
    if not read(given, "save_projection", flag, True):
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            "save_projection is false: PEFT would make vera_A and vera_B again from a seed, which "
            "torch does not promise to be equal in all its versions.",
            fix="Load it with PEFT where it was trained, set save_projection=True and save it.",
        )
    return {"r": read(given, "r", rank, 256)}


def ia3(given: Fields) -> dict[str, object]:
    if given.get("feedforward_modules") is None:
        raise AdapterRefused(
            RefusalCode.NO_TARGETS,
            "feedforward_modules is not set.",
            fix="Write into adapter_config.json the modules whose input it scales; [] for none.",
        )
    return {"feedforward_modules": read(given, "feedforward_modules", plain_names, NO_NAMES)}


def plain_names(name: str, value: object) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else names_or_pattern(name, value)


def nothing(given: Fields) -> dict[str, object]:
    return {}


def oft(given: Fields) -> dict[str, object]:
    if "oft_block_size" not in given:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            "oft_block_size is absent: the adapter is of PEFT before 0.14, where OFT computed "
            "another result.",
            fix="Train it again with a newer PEFT.",
        )
    series = read(given, "use_cayley_neumann", flag, True)
    if series and _version(given.get("peft_version")) < CAYLEY_SERIES_SINCE:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            "use_cayley_neumann is set, and peft_version is older than 0.18, where the series was "
            "another one.",
            fix="Train it again with a newer PEFT, or with use_cayley_neumann=False.",
        )
    r = read(given, "r", count_or_zero, 0)
    block = read(given, "oft_block_size", count_or_zero, 32)
    check_one_set("r", r, "oft_block_size", block)
    terms = read(given, "num_cayley_neumann_terms", rank, 5) if series else 0
    if terms > MAX_CAYLEY_TERMS:
        raise bad_value("num_cayley_neumann_terms", f"at most {MAX_CAYLEY_TERMS}", terms)
    eps = read(given, "eps", number, 6e-5)
    return {
        "r": r,
        "oft_block_size": block,
        "block_share": read(given, "block_share", flag, False),
        "coft_eps": eps if read(given, "coft", flag, False) else None,
        "cayley_terms": terms,
    }


def _version(value: object) -> tuple[int, ...]:
    """Return the first two numbers of a version; (0,) if there are none."""
    parts = value.split(".")[:2] if isinstance(value, str) else []
    return tuple(map(int, parts)) if parts and all(part.isdecimal() for part in parts) else (0,)


def boft(given: Fields) -> dict[str, object]:
    factors = read(given, "boft_n_butterfly_factor", rank, 1)
    if factors != 1:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            f"boft_n_butterfly_factor is {factors}: PEFT itself ignores it where its CUDA "
            "extension cannot be built, so that the config does not determine the result.",
            fix="Train it with boft_n_butterfly_factor=1.",
        )
    size = read(given, "boft_block_size", count_or_zero, 4)
    count = read(given, "boft_block_num", count_or_zero, 0)
    check_one_set("boft_block_size", size, "boft_block_num", count)
    return {"boft_block_size": size, "boft_block_num": count}


def check_one_set(first: str, a: int, second: str, b: int) -> None:
    if (a == 0) == (b == 0):
        raise AdapterRefused(
            RefusalCode.BAD_VALUE,
            f"{first} is {a} and {second} is {b}; exactly one of them must be 0.",
            fix="Correct it in adapter_config.json.",
        )


def hra(given: Fields) -> dict[str, object]:
    return {"r": read(given, "r", rank, 8), "apply_gs": read(given, "apply_GS", flag, False)}


def miss(given: Fields) -> dict[str, object]:
    start = given.get("init_weights")
    if start is not None and not isinstance(start, bool) and start not in ("bat", "mini"):
        raise bad_value("init_weights", "true, false, 'bat' or 'mini'", start)
    variant = start if isinstance(start, str) else ""
    mini_r = read(given, "mini_r", rank, 1)
    return {
        "r": read(given, "r", rank, 64),
        "variant": variant,
        "mini_r": mini_r if variant == "mini" else 0,
    }


@dataclass(frozen=True, slots=True)
class ConfigParser:
    """How the fields of one type are read."""

    config: type[TypeConfig]
    read: Callable[[Fields], dict[str, object]]
    honoured: frozenset[str]
    """The fields of the type that `read` reads."""


PARSERS: dict[str, ConfigParser] = {
    parser.config.peft_type: parser
    for parser in (
        ConfigParser(
            LohaConfig, lycoris, frozenset({"r", "alpha", "rank_pattern", "alpha_pattern"})
        ),
        ConfigParser(
            LokrConfig,
            lokr,
            frozenset(
                {
                    "r",
                    "alpha",
                    "rank_pattern",
                    "alpha_pattern",
                    "decompose_both",
                    "decompose_factor",
                }
            ),
        ),
        ConfigParser(AdaLoraConfig, adalora, frozenset({"init_r", "lora_alpha", "rank_pattern"})),
        ConfigParser(VeraConfig, vera, frozenset({"r", "save_projection"})),
        ConfigParser(Ia3Config, ia3, frozenset({"feedforward_modules"})),
        ConfigParser(BeftConfig, nothing, frozenset()),
        ConfigParser(LnTuningConfig, nothing, frozenset()),
        ConfigParser(
            OftConfig,
            oft,
            frozenset(
                {
                    "r",
                    "oft_block_size",
                    "block_share",
                    "coft",
                    "eps",
                    "use_cayley_neumann",
                    "num_cayley_neumann_terms",
                }
            ),
        ),
        ConfigParser(
            BoftConfig,
            boft,
            frozenset({"boft_block_size", "boft_block_num", "boft_n_butterfly_factor"}),
        ),
        ConfigParser(HraConfig, hra, frozenset({"r", "apply_GS"})),
        ConfigParser(MissConfig, miss, frozenset({"r", "init_weights", "mini_r"})),
    )
}


def parse_adapter_config(given: Fields) -> PeftLoraConfig | TypeConfig:
    """Parse the config of any PEFT type that is served; raise AdapterRefused."""
    peft_type = given.get("peft_type")
    parser = PARSERS.get(peft_type) if isinstance(peft_type, str) else None
    if parser is not None:
        return _parse_type(parser, given)
    if isinstance(peft_type, str) and (group := UNSERVED.get(peft_type)):
        raise AdapterRefused(
            RefusalCode.NOT_LORA, f"peft_type is {peft_type}, which {group.reason}.", fix=group.fix
        )
    return parse_config(given)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read and check the config of an adapter folder of any type; raise AdapterRefused."""
    return parse_adapter_config(decode_json(read_config_bytes(folder)))


def lora_config(config: AdapterConfig, name: str) -> PeftLoraConfig:
    """Return the config of a LORA adapter; refuse other types, whose matrices are computed."""
    if not isinstance(config, PeftLoraConfig):
        raise AdapterRefused(
            RefusalCode.NOT_LORA,
            f"{name} is of type {config.canonical()['peft_type']}; only LORA adapters can be "
            "combined and converted.",
            fix="Leave it out.",
        )
    return config


def _parse_type(parser: ConfigParser, given: Fields) -> TypeConfig:
    known = (COMMON_FIELDS - parser.config.absent) | parser.honoured | parser.config.harmless
    check_unsupported(given, REFUSED)
    check_unknown(given, known | REFUSED.keys())
    arguments = common(given) | parser.read(given)
    config = parser.config(**arguments)  # type: ignore[arg-type]
    check_targets(config, given)
    if config.peft_type == "LN_TUNING" and config.target_modules == ALL_LINEAR:
        raise bad_value("target_modules", "names of norms", ALL_LINEAR)
    return config
