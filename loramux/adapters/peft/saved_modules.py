"""Modules of the base that an adapter replaces (modules_to_save): projections and norms."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loramux.adapters.packed.extras import (
    ATTENTION_NORM,
    FINAL_NORM,
    HEAD,
    MLP_NORM,
    MODEL_LEVEL,
    ExtraKind,
    ExtraSpec,
)
from loramux.adapters.peft.making import PartMaker, PartValues, WeightMaker, check_matrix
from loramux.adapters.peft.parts import ExtraTensor
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.adapters.peft.targets import is_saved
from loramux.adapters.peft.tensors import check_modules_exist
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo

if TYPE_CHECKING:
    import torch

_LAYER_NORM = re.compile(r"model\.layers\.(\d+)\.(\w+)")
_FINAL_NORM_PATH = "model.norm"
_CLASSIFIER = re.compile(r"(?:.*\.)?(?:score|classifier|classification_head|qa_outputs)(?:\..*)?")
LABELS_PATH = "score"
"""The head of a sequence classifier."""
_OTHER_NORM = re.compile(r".*norm")


@dataclass(frozen=True, slots=True)
class NormMaker:
    """The gain of a norm: w' / w - 1."""

    spec: ExtraSpec
    entry: TensorEntry
    path: str
    offset: float
    """1 if the checkpoint stores the weight minus one."""

    @property
    def specs(self) -> tuple[ExtraSpec, ...]:
        return (self.spec,)

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        return (self.entry,)

    @property
    def computes(self) -> bool:
        return True

    def make(self, values: PartValues) -> Iterator[ExtraTensor]:
        if values.base is None:
            return
        base = values.base.norm(self.spec.layer, self.spec.module).float().cpu().reshape(-1)
        saved = values.of(self.entry).float() + self.offset
        yield ExtraTensor(self.spec.key, self._gain(saved, base).view(1, -1))

    def _gain(self, saved: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        is_zero = base == 0
        if (is_zero & (saved != 0)).any():
            raise AdapterRefused(
                RefusalCode.UNSUPPORTED_TARGET,
                f"The adapter replaces {self.path}, whose weight in the base is 0 in some places; "
                "a retrained norm is served as a factor of the base's.",
                fix=f"Train it without {self.path.rpartition('.')[2]} in modules_to_save.",
            )
        return saved.masked_fill(is_zero, 1.0) / base.masked_fill(is_zero, 1.0) - 1


def norm_paths(base: BaseModelInfo) -> dict[str, tuple[int, str]]:
    """Return (layer, name) of the norms that an adapter may replace, by path."""
    names = {base.norm_names.attention: ATTENTION_NORM, base.norm_names.mlp: MLP_NORM}
    return {
        **{
            f"model.layers.{layer}.{name}": (layer, module)
            for layer in range(base.num_layers)
            for name, module in names.items()
            if name is not None
        },
        _FINAL_NORM_PATH: (MODEL_LEVEL, FINAL_NORM),
    }


def plan_replaced(weights: dict[str, TensorEntry], base: BaseModelInfo) -> list[PartMaker]:
    """Return makers for the whole weights of projections and norms; refuse other modules.

    PEFT loads any weight of the base that the file holds, whether or not it is in modules_to_save.
    """
    targets = {target.path: target for target in base.targets}
    norms = norm_paths(base)
    makers: list[PartMaker] = []
    others = []
    for path, entry in weights.items():
        if path in targets:
            target = targets[path]
            shape = (target.out_features, target.in_features)
            check_matrix(entry, shape, path)
            spec = ExtraSpec(target.layer, target.projection, ExtraKind.WEIGHT, *shape)
            makers.append(WeightMaker(spec, entry))
        elif path in norms:
            check_matrix(entry, (base.hidden_size,), path)
            spec = ExtraSpec(*norms[path], ExtraKind.GAIN, 1, base.hidden_size)
            makers.append(NormMaker(spec, entry, path, 1.0 if base.norm_plus_one else 0.0))
        elif path == LABELS_PATH and base.num_labels:
            shape = (base.num_labels, base.hidden_size)
            check_matrix(entry, shape, path)
            spec = ExtraSpec(MODEL_LEVEL, HEAD, ExtraKind.WEIGHT, *shape)
            makers.append(WeightMaker(spec, entry))
        else:
            others.append(path)
    _refuse_other_norms(others)
    check_modules_exist(others, [], base)
    return makers


def check_saved(names: Sequence[str], weights: Collection[str], base: BaseModelInfo) -> None:
    """Refuses a file without the weight of a module that modules_to_save names."""
    if not names:
        return
    known = [*(target.path for target in base.targets), *norm_paths(base)]
    if base.num_labels:
        known.append(LABELS_PATH)
    missing = [path for path in known if path not in weights and is_saved(names, path)]
    if missing:
        raise AdapterRefused(
            RefusalCode.MISSING_TENSORS,
            f"modules_to_save names modules that the file has no weights for: "
            f"{name_some(missing)}.",
            fix="Make modules_to_save fit the file.",
        )


def refuse_classifiers(paths: Iterable[str], base: BaseModelInfo) -> None:
    """Refuses heads of other tasks; a sequence classifier may have its own replaced."""
    own = LABELS_PATH if base.num_labels else None
    heads = sorted(path for path in paths if _CLASSIFIER.fullmatch(path) and path != own)
    if heads:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_TARGET,
            f"The file holds a classifier head ({name_some(heads)}), and this server generates "
            "text.",
            fix="Serve it with AutoModelForSequenceClassification (or the class of its task) and "
            "PEFT, or train it with task_type CAUSAL_LM.",
        )


def _refuse_other_norms(paths: Iterable[str]) -> None:
    norms = sorted(path for path in paths if _OTHER_NORM.fullmatch(path))
    if norms:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_TARGET,
            f"The adapter replaces {name_some(norms)}; of the norms, only those before attention "
            "and MLP and the final one can be replaced.",
            fix="Train it without these norms in modules_to_save.",
        )
