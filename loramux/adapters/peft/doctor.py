"""Makes the report of `loramux doctor` about an adapter folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from loramux.adapters.peft.reader import CheckedAdapter, read_adapter
from loramux.adapters.peft.safetensors import read_metadata
from loramux.adapters.peft.weights import open_weights
from loramux.adapters.recipe import find_recipe
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.types.model import BaseModelInfo

NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True)
class Refusal:
    code: str
    reason: str
    fix: str


@dataclass(frozen=True, slots=True)
class ModuleReport:
    path: str
    rank: int
    alpha: float
    scale: float
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of an examination; a refused adapter has no facts beside the refusal."""

    folder: str
    base: str
    refusal: Refusal | None = None
    cid: str | None = None
    size_bytes: int | None = None
    modules: tuple[ModuleReport, ...] = ()
    tensors_used: int = 0
    tensors_unused: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    max_logit_change: float | None = None
    """The largest change of a logit of the base on fixed tokens; None if not measured."""
    recipe: dict[str, object] | None = None
    """The parts, weights and method of a combined adapter."""

    @property
    def ok(self) -> bool:
        return self.refusal is None

    def to_dict(self) -> dict[str, object]:
        """Returns the report as values that JSON can hold."""
        return {"ok": self.ok, **asdict(self)}


def examine(
    folder: Path, base: BaseModelInfo, *, max_rank: int | None = None, strict_base: bool = False
) -> Report:
    """Reads the adapter and reports a refusal as a finding instead of raising it."""
    try:
        adapter = read_adapter(folder, base, max_rank=max_rank, strict_base=strict_base)
    except AdapterRefused as error:
        return report_refusal(folder, base, Refusal(str(error.code), error.reason, error.fix))
    except AdapterNotFound as error:
        return report_refusal(folder, base, Refusal(NOT_FOUND, str(error), ""))
    return describe(adapter, base)


def describe(adapter: CheckedAdapter, base: BaseModelInfo) -> Report:
    with open_weights(adapter.path) as weights:
        recipe = find_recipe(read_metadata(weights.head))
    return Report(
        folder=str(adapter.path),
        base=base.name,
        cid=adapter.cid,
        size_bytes=adapter.size_bytes,
        modules=tuple(
            ModuleReport(
                path=module.target.path,
                rank=module.rank,
                alpha=module.alpha,
                scale=module.scale,
                dtype=str(module.a.dtype).removeprefix("torch."),
            )
            for module in adapter.modules
        ),
        tensors_used=len(adapter.tensors_used),
        tensors_unused=adapter.tensors_unused,
        warnings=adapter.warnings,
        recipe=None if recipe is None else recipe.to_dict(),
    )


def report_refusal(folder: Path, base: BaseModelInfo, refusal: Refusal) -> Report:
    return Report(folder=str(folder), base=base.name, refusal=refusal)
