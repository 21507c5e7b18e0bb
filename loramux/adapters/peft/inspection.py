"""Checks the config and the header of an adapter's weights against the base; reads no tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from loramux.adapters.packed.extras import EMBEDDING, HEAD, ExtraSpec, num_tokens_of
from loramux.adapters.peft.activation import check_invocation
from loramux.adapters.peft.config import (
    PeftLoraConfig,
    decode_json,
    read_config_bytes,
)
from loramux.adapters.peft.folder import short_base_name
from loramux.adapters.peft.matching import plan_lora
from loramux.adapters.peft.parts import AdapterContents, AdapterPlan
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import TensorEntry, parse_header
from loramux.adapters.peft.types.configs import AdapterConfig, TypeConfig, parse_adapter_config
from loramux.adapters.peft.types.registry import plan_type
from loramux.adapters.peft.weights import WeightsFile, open_weights
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo

MAX_KEPT = 64
# The header of an adapter on all linear layers of a base with 80 layers has 150 kB.
MAX_KEPT_BYTES = 2**18

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, eq=False)
class InspectedAdapter:
    """What the config and the header of the weights say of an adapter that this base can serve."""

    path: Path
    config: AdapterConfig
    contents: AdapterContents
    warnings: tuple[str, ...]

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        """The rank at each (layer, projection) with low rank."""
        return self.contents.ranks

    @property
    def extras(self) -> tuple[ExtraSpec, ...]:
        """The parts beside the low rank of the projections."""
        return self.contents.extras

    @property
    def only_alone(self) -> str:
        """Why the adapter cannot be part of a sum or have a weight; empty if it can."""
        return self.config.only_alone or self.contents.only_alone

    @property
    def size_bytes(self) -> int:
        """The size of the tensors in the file that parts are made of."""
        return sum(entry.num_bytes for entry in self.contents.used)


@dataclass(frozen=True, slots=True)
class ConfigFindings:
    config: AdapterConfig
    plan: AdapterPlan
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeaderFindings:
    entries: tuple[TensorEntry, ...]
    contents: AdapterContents


class Recent(Generic[Key, Value]):
    """Keeps the values of some recently made keys."""

    def __init__(self) -> None:
        self._values: dict[Key, Value] = {}

    def find(self, key: Key, make: Callable[[], Value], *, num_bytes: int) -> Value:
        """`num_bytes`: the size of the key; large ones are not kept."""
        value = self._values.get(key)
        if value is None:
            value = make()
            if len(self._values) >= MAX_KEPT:
                self._values.clear()
            if num_bytes <= MAX_KEPT_BYTES:
                self._values[key] = value
        return value


class Inspector:
    """Inspects adapter folders for one base.

    Adapters that were trained alike have the same config and header, and differ in the values only,
    so that findings are kept by the bytes that they follow from. Any thread may call it.
    """

    def __init__(
        self, base: BaseModelInfo, *, max_rank: int | None = None, strict_base: bool = False
    ) -> None:
        self._base = base
        self._max_rank = max_rank
        self._strict_base = strict_base
        self._configs: Recent[bytes, ConfigFindings] = Recent()
        self._headers: Recent[tuple[bytes, bytes, int], HeaderFindings] = Recent()

    def inspect(self, folder: Path) -> InspectedAdapter:
        """Inspects a folder, given by its real path; raises AdapterRefused."""
        with self.open(folder) as (found, _):
            return found

    @contextmanager
    def open(self, folder: Path) -> Iterator[tuple[InspectedAdapter, WeightsFile]]:
        """Inspects a folder, given by its real path, and keeps its weights file open."""
        text = read_config_bytes(folder)
        config = self._configs.find(text, lambda: self._check_config(text), num_bytes=len(text))
        contents: AdapterContents | None = None

        def parse(header: bytes, data_bytes: int) -> tuple[TensorEntry, ...]:
            nonlocal contents
            found = self._headers.find(
                (text, header, data_bytes),
                lambda: self._check_header(config, header, data_bytes),
                num_bytes=len(text) + len(header),
            )
            contents = found.contents
            return found.entries

        with open_weights(folder, parse) as weights:
            assert contents is not None
            warnings = (*config.warnings, *contents.warnings)
            yield InspectedAdapter(folder, config.config, contents, warnings), weights

    def _check_config(self, text: bytes) -> ConfigFindings:
        config = parse_adapter_config(decode_json(text))
        check_invocation(config.invocation_tokens, self._base.vocab_size)
        warnings = check_base_name(config, self._base, strict=self._strict_base)
        warnings += check_folded(config, self._base)
        warnings += check_task(config, self._base)
        return ConfigFindings(config, self._plan(config), tuple(warnings))

    def _plan(self, config: PeftLoraConfig | TypeConfig) -> AdapterPlan:
        if isinstance(config, PeftLoraConfig):
            return plan_lora(config, self._base)
        return plan_type(config, self._base)

    def _check_header(
        self, config: ConfigFindings, header: bytes, data_bytes: int
    ) -> HeaderFindings:
        entries = parse_header(header, data_bytes)
        contents = config.plan.match(entries, max_rank=self._max_rank)
        check_vocabulary(contents.extras, self._base.vocab_size)
        return HeaderFindings(entries, contents)


def check_vocabulary(extras: Sequence[ExtraSpec], vocab_size: int) -> None:
    """Refuses an output head with tokens that the embedding does not have."""
    read = num_tokens_of(extras, EMBEDDING) or vocab_size
    written = num_tokens_of(extras, HEAD) or vocab_size
    if written > read:
        raise AdapterRefused(
            RefusalCode.WRONG_SHAPE,
            f"The output head has {written} tokens and the embedding {read}, so that a generated "
            "token could not be read again.",
            fix="Save lm_head and embed_tokens of the same resized model in modules_to_save.",
        )


def check_base_name(config: AdapterConfig, base: BaseModelInfo, *, strict: bool) -> list[str]:
    recorded = config.base_model_name
    if recorded is None:
        return ["The config does not record the base that the adapter was trained on."]
    if is_same_base(recorded, base):
        return []
    message = f"The adapter was trained on {recorded[:200]!r}; this base is {base.name!r}."
    if strict:
        raise AdapterRefused(
            RefusalCode.OTHER_BASE,
            message,
            fix="Serve it on its own base, or allow other base names.",
        )
    return [message]


def is_same_base(recorded: str, base: BaseModelInfo) -> bool:
    return short_base_name(recorded) == short_base_name(base.name)


def check_folded(config: AdapterConfig, base: BaseModelInfo) -> list[str]:
    """Return what folded scales of the base mean for an adapter of another checkpoint."""
    recorded = config.base_model_name
    if base.folded_scales == "none" or (recorded is not None and is_same_base(recorded, base)):
        return []
    if base.folded_scales == "known":
        return ["The adapter is fitted to the scales that are folded into this base (--original)."]
    return [
        f"The quantiser of this base ({base.quantisation}) may have folded scales into its norms "
        "and weights, so that an adapter trained on the unquantised model reads scaled inputs and "
        "its answers change. Give the unquantised model with --original, and it is fitted exactly."
    ]


def check_task(config: AdapterConfig, base: BaseModelInfo) -> list[str]:
    tasks = ("SEQ_CLS",) if base.num_labels else ("CAUSAL_LM", "FEATURE_EXTRACTION")
    if config.task_type in (None, *tasks):
        return []
    if base.num_labels:
        return [f"The adapter was trained for {config.task_type}, not for classification."]
    return [f"The adapter was trained for {config.task_type}, not for text generation."]
