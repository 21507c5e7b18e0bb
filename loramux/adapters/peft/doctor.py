"""Makes the report of `loramux doctor` about an adapter folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loramux.adapters.packed.extras import ExtraSpec
from loramux.adapters.peft.config import decode_json, read_config_bytes
from loramux.adapters.peft.effects import extra_norms, module_norm
from loramux.adapters.peft.field_report import FieldReport, report_fields
from loramux.adapters.peft.inspection import Inspector
from loramux.adapters.peft.parts import BaseWeights, ExtraTensor, LoraModule
from loramux.adapters.peft.reader import CheckedAdapter, read_adapter
from loramux.adapters.peft.safetensors import read_metadata
from loramux.adapters.peft.weights import open_weights
from loramux.adapters.recipe import find_recipe
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.types.model import BaseModelInfo

NOT_FOUND = "not_found"
WeightNorms = Callable[[Sequence[str]], Mapping[str, float]]
"""Returns the Frobenius norms of weights of the base by module path, as far as it has them."""


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
    layer: int = 0
    projection: str = ""
    file_bytes: int = 0
    pool_bytes: int = 0
    effect: float | None = None
    """||scale * B A||, the Frobenius norm of what it adds to the weight."""
    relative: float | None = None
    """The effect divided by the norm of the weight of the base, if that was read."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """A part beside the low rank of a linear layer; `ExtraKind` says what each kind computes."""

    kind: str
    layer: int
    """-1: outside the decoder layers."""
    module: str
    num_rows: int
    width: int
    file_bytes: int = 0
    """The size of its values as they were read; 0 if they are computed from the base."""
    pool_bytes: int = 0
    effect: float | None = None
    """The Frobenius norm of its values; of low rank, that of both matrices multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCost:
    kind: str
    modules: int
    file_bytes: int
    pool_bytes: int
    token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the adapter takes in the pool of a server on this machine, and in a decode step."""

    dtype: str
    pages: int
    page_bytes: int
    pool_bytes: int
    token_bytes: int
    """Bytes that a decode step reads for a token."""
    base_token_bytes: int
    """The same for the weights of the base, which all tokens of a batch share."""
    kinds: tuple[KindCost, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of an examination; a refused adapter has no facts beside the refusal."""

    folder: str
    base: str
    refusal: Refusal | None = None
    cid: str | None = None
    size_bytes: int | None = None
    modules: tuple[ModuleReport, ...] = ()
    parts: tuple[PartReport, ...] = ()
    fields: tuple[FieldReport, ...] = ()
    """Every field of the config."""
    cost: Cost | None = None
    tensors_used: int = 0
    tensors_unused: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    max_logit_change: float | None = None
    """The largest change of a logit of the base on fixed tokens; None if not measured."""
    recipe: dict[str, object] | None = None
    """The parts, weights and method of a combined adapter."""
    num_signatures: int = 0
    """Signatures in the folder, which a push checks."""
    signed_by: str | None = None
    """The id of the given key that made one of them."""

    @property
    def ok(self) -> bool:
        return self.refusal is None

    @property
    def needs_base(self) -> bool:
        """Whether a part is computed from the weights of the base, which were not given."""
        return any(part.effect is None for part in self.parts)

    def to_dict(self) -> dict[str, object]:
        """Return the report as values that JSON can hold."""
        return {"ok": self.ok, **asdict(self)}


def examine(
    folder: Path,
    base: BaseModelInfo,
    *,
    max_rank: int | None = None,
    strict_base: bool = False,
    base_weights: BaseWeights | None = None,
    weight_norms: WeightNorms | None = None,
) -> Report:
    """Read the adapter and report a refusal as a finding instead of raising it.

    Without `base_weights`, parts that are computed from them have no effect in the report.
    """
    try:
        adapter = read_adapter(
            folder, base, max_rank=max_rank, strict_base=strict_base, base_weights=base_weights
        )
        inspector = Inspector(base, max_rank=max_rank, strict_base=strict_base)
        specs = inspector.inspect(adapter.path).extras
    except AdapterRefused as error:
        return report_refusal(folder, base, Refusal(str(error.code), error.reason, error.fix))
    except AdapterNotFound as error:
        return report_refusal(folder, base, Refusal(NOT_FOUND, str(error), ""))
    return describe(adapter, base, specs=specs, weight_norms=weight_norms)


def describe(
    adapter: CheckedAdapter,
    base: BaseModelInfo,
    *,
    specs: Sequence[ExtraSpec] = (),
    weight_norms: WeightNorms | None = None,
) -> Report:
    """Return the report of an adapter that was read; `specs` are those of all its extras."""
    norms = {} if weight_norms is None else weight_norms([m.target.path for m in adapter.modules])
    with open_weights(adapter.path) as weights:
        recipe = find_recipe(read_metadata(weights.head))
    return Report(
        folder=str(adapter.path),
        base=base.name,
        cid=adapter.cid,
        size_bytes=adapter.size_bytes,
        modules=tuple(
            _module_report(module, norms.get(module.target.path)) for module in adapter.modules
        ),
        parts=_part_reports(specs, adapter.extras),
        fields=_fields(adapter.path, is_served=True),
        tensors_used=len(adapter.tensors_used),
        tensors_unused=adapter.tensors_unused,
        warnings=adapter.warnings,
        recipe=None if recipe is None else recipe.to_dict(),
    )


def report_refusal(folder: Path, base: BaseModelInfo, refusal: Refusal) -> Report:
    fields = _fields(folder, is_served=False)
    return Report(folder=str(folder), base=base.name, refusal=refusal, fields=fields)


def _module_report(module: LoraModule, weight_norm: float | None) -> ModuleReport:
    effect = module_norm(module)
    return ModuleReport(
        path=module.target.path,
        rank=module.rank,
        alpha=module.alpha,
        scale=module.scale,
        dtype=str(module.a.dtype).removeprefix("torch."),
        layer=module.target.layer,
        projection=module.target.projection,
        file_bytes=module.a.nbytes + module.b.nbytes,
        effect=effect,
        relative=effect / weight_norm if weight_norm else None,
    )


def _part_reports(
    specs: Sequence[ExtraSpec], extras: Sequence[ExtraTensor]
) -> tuple[PartReport, ...]:
    effects, sizes = extra_norms(extras), {part.key: part.values.nbytes for part in extras}
    return tuple(
        PartReport(
            kind=str(spec.kind),
            layer=spec.layer,
            module=spec.module,
            num_rows=spec.num_rows,
            width=spec.width,
            file_bytes=sizes.get(spec.key, 0),
            effect=effects.get(spec.key),
        )
        for spec in specs
    )


def _fields(folder: Path, *, is_served: bool) -> tuple[FieldReport, ...]:
    """Return the fields of a config; none if it cannot be read, which is a refusal itself."""
    try:
        fields = decode_json(read_config_bytes(folder.resolve()))
    except AdapterRefused:
        return ()
    return report_fields(fields, is_served=is_served)
