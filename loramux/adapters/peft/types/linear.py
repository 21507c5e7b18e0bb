"""Parts of adapters that change linear layers, made by the rule of their PEFT type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loramux.adapters.packed.extras import ExtraKey, ExtraKind, ExtraSpec
from loramux.adapters.peft.parts import AdapterParts, BaseWeights, ExtraTensor, LoraModule
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.adapters.peft.types.matching import MODULE_PREFIX, Expected, Shape, match_entries
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, LinearSpec, TargetModule

REPLACES_WEIGHTS = "it replaces whole weights of the base, which cannot be added up"

Targets = tuple[TargetModule, ...]
Tensors = Mapping[str, torch.Tensor]
"""The float32 tensors of one module by the name of their parameter, and shared ones."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A delta of scale * (b @ a)."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class VectorPlace:
    """Columns of a fused linear that a vector changes."""

    fused: LinearSpec
    start: int
    kind: ExtraKind
    """GAIN: the values are factors, BIAS: they are added."""


class LinearRule(ABC):
    """What a PEFT type computes in a linear layer; each rule is for one config."""

    has_native_rank = False
    """Whether the file has the matrices of the low rank, so that a rank limit applies to it."""

    @abstractmethod
    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        """Return the shape of each parameter of a module."""

    def shared_shapes(self, targets: Targets) -> Mapping[str, Shape]:
        """Return the shapes of tensors that all modules share."""
        return {}

    def rank(self, target: TargetModule) -> int | None:
        """Return the rank of the exact low rank; None if the delta has none below full rank."""
        return None

    def place(self, target: TargetModule) -> VectorPlace | None:
        """Return the place of a vector, if the type changes columns of the output only."""
        return None

    def low_rank(self, target: TargetModule, tensors: Tensors) -> LowRank:
        """Return the exact low rank; types for which `rank` is never None override it."""
        raise NotImplementedError

    def vector(self, tensors: Tensors) -> torch.Tensor:
        """Return the values of the vector; types for which `place` is never None override it."""
        raise NotImplementedError

    def weight(self, target: TargetModule, tensors: Tensors, base: torch.Tensor) -> torch.Tensor:
        """Return the weight that replaces the float32 weight of the base."""
        low = self.low_rank(target, tensors)
        return base + low.scale * (low.b @ low.a)


def column_place(base: BaseModelInfo, projection: str, kind: ExtraKind) -> VectorPlace:
    """Return the output columns of a projection."""
    fused = next(fused for fused in base.linears if projection in fused.projections)
    return VectorPlace(fused, fused.columns[projection].start, kind)


def up_place(base: BaseModelInfo, kind: ExtraKind) -> VectorPlace:
    """Return the output columns that a gate multiplies."""
    gated = next(fused for fused in base.linears if fused.is_gated)
    return VectorPlace(gated, gated.num_outputs // 2, kind)


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """The linear layers that a config targets, and the rule of its type."""

    rule: LinearRule
    targets: Targets
    base: BaseModelInfo

    def match(self, entries: Sequence[TensorEntry], *, max_rank: int | None) -> LinearContents:
        shared = self.rule.shared_shapes(self.targets)
        expected = {name: Expected("", shape) for name, shape in shared.items()}
        for target in self.targets:
            for part, shape in self.rule.shapes(target).items():
                name = f"{MODULE_PREFIX}{target.path}.{part}"
                expected[name] = Expected(target.path, shape)
        found = match_entries(entries, expected, self.base)
        return LinearContents(
            rule=self.rule,
            modules=tuple(self._plan_module(target, max_rank, found) for target in self.targets),
            shared={name: found[name] for name in shared},
        )

    def _plan_module(
        self, target: TargetModule, max_rank: int | None, found: Mapping[str, TensorEntry]
    ) -> ModuleParts:
        names = {part: f"{MODULE_PREFIX}{target.path}.{part}" for part in self.rule.shapes(target)}
        entries = {part: found[name] for part, name in names.items()}
        place = self.rule.place(target)
        rank = None if place else self._served_rank(target, max_rank)
        return ModuleParts(target, entries, place, rank)

    def _served_rank(self, target: TargetModule, max_rank: int | None) -> int | None:
        """Return the rank of the low rank; None where the whole weight is served instead."""
        rank = self.rule.rank(target)
        if rank is None:
            return None
        over = max_rank is not None and rank > max_rank
        if over and self.rule.has_native_rank:
            raise AdapterRefused(
                RefusalCode.RANK_OVER_CAP,
                f"{target.path} has rank {rank}; this server takes at most {max_rank}.",
                fix="Raise the server's rank limit, or train with a smaller rank.",
            )
        sides = target.in_features, target.out_features
        return None if over or rank * sum(sides) >= sides[0] * sides[1] else rank


@dataclass(frozen=True, slots=True)
class ModuleParts:
    """How one module is served: as a vector, as low rank, or as a whole weight (neither)."""

    target: TargetModule
    entries: Mapping[str, TensorEntry]
    place: VectorPlace | None
    rank: int | None

    @property
    def is_weight(self) -> bool:
        return self.place is None and self.rank is None

    @property
    def spec(self) -> ExtraSpec | None:
        """The extra; vectors of one fused linear share one."""
        target, place = self.target, self.place
        if place is not None:
            width = sum(place.fused.out_features)
            return ExtraSpec(target.layer, place.fused.name, place.kind, 1, width)
        if self.rank is not None:
            return None
        shape = target.out_features, target.in_features
        return ExtraSpec(target.layer, target.projection, ExtraKind.WEIGHT, *shape)


@dataclass(frozen=True, slots=True)
class LinearContents:
    """The modules of an adapter, with the tensors of each."""

    rule: LinearRule
    modules: tuple[ModuleParts, ...]
    shared: Mapping[str, TensorEntry]

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        return {(m.target.layer, m.target.projection): m.rank for m in self.modules if m.rank}

    @property
    def extras(self) -> tuple[ExtraSpec, ...]:
        specs = (module.spec for module in self.modules)
        return tuple(dict.fromkeys(spec for spec in specs if spec is not None))

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        own = [e for module in self.modules if module.rank != 0 for e in module.entries.values()]
        return (*self.shared.values(), *own)

    @property
    def unused(self) -> tuple[str, ...]:
        """The empty tensors of modules of rank 0."""
        return tuple(e.name for m in self.modules if m.rank == 0 for e in m.entries.values())

    @property
    def only_alone(self) -> str:
        return REPLACES_WEIGHTS if any(module.is_weight for module in self.modules) else ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Tells the size in memory where it exceeds that of the file's tensors."""
        sides = {
            (m.target.layer, m.target.projection): m.target.in_features + m.target.out_features
            for m in self.modules
        }
        ranks = self.ranks
        served = sum(rank * sides[key] for key, rank in ranks.items())
        served += sum(spec.num_rows * spec.width for spec in self.extras)
        saved = sum(_num_elements(entry) for entry in self.used)
        whole = Counter(module.is_weight for module in self.modules)[True]
        if served <= saved or not (whole or ranks):
            return ()
        forms = [f"rank {max(ranks.values())} in {len(ranks)} modules"] if ranks else []
        forms += [f"whole weights in {whole} modules"] if whole else []
        return (
            f"The {saved:,} values of the file take {served:,} when they are served exactly: "
            f"{' and '.join(forms)}.",
        )

    @property
    def are_views(self) -> bool:
        return False

    def make_parts(
        self, tensors: Mapping[str, torch.Tensor], base_weights: BaseWeights | None
    ) -> AdapterParts:
        shared = {name: tensors[entry.name].float() for name, entry in self.shared.items()}
        modules: list[LoraModule] = []
        vectors: dict[ExtraKey, torch.Tensor] = {}
        weights: list[ExtraTensor] = []
        changes = False
        for module in self.modules:
            own = {part: tensors[entry.name].float() for part, entry in module.entries.items()}
            if module.place is not None:
                _add_vector(vectors, module, self.rule.vector(own))
            elif module.rank is not None:
                if module.rank:
                    modules.append(self._make_low_rank(module, module.rank, own | shared))
            elif base_weights is not None:
                target = module.target
                base = base_weights.weight(target.layer, target.projection)
                base = base.detach().to(device="cpu", dtype=torch.float32)
                made = self.rule.weight(target, own | shared, base)
                changes = changes or not torch.equal(made, base)
                key = (target.layer, target.projection, ExtraKind.WEIGHT)
                weights.append(ExtraTensor(key, made.contiguous()))
        changes = changes or any(bool(values.count_nonzero()) for values in vectors.values())
        is_complete = base_weights is not None or not self.only_alone
        if is_complete and not changes and not modules:
            raise no_effect()
        made_vectors = (ExtraTensor(key, values[None]) for key, values in vectors.items())
        extras = {extra.key: check_finite(extra) for extra in (*made_vectors, *weights)}
        ordered = (extras[spec.key] for spec in self.extras if spec.key in extras)
        return AdapterParts(tuple(modules), tuple(ordered))

    def _make_low_rank(self, module: ModuleParts, rank: int, tensors: Tensors) -> LoraModule:
        low = self.rule.low_rank(module.target, tensors)
        return LoraModule(
            target=module.target,
            rank=rank,
            alpha=low.scale * rank,
            scale=low.scale,
            a=low.a.contiguous(),
            b=low.b.contiguous(),
        )


def _add_vector(
    vectors: dict[ExtraKey, torch.Tensor], module: ModuleParts, values: torch.Tensor
) -> None:
    """Add a vector of biases, or multiplies by a vector of factors, which are stored minus 1."""
    place = module.place
    assert place is not None
    key = (module.target.layer, place.fused.name, place.kind)
    if key not in vectors:
        vectors[key] = torch.zeros(sum(place.fused.out_features))
    columns = vectors[key][place.start : place.start + len(values)]
    if place.kind is ExtraKind.GAIN:
        columns.add_(1).mul_(values).sub_(1)
    else:
        columns.add_(values)


def _num_elements(entry: TensorEntry) -> int:
    return torch.Size(entry.shape).numel()


def check_finite(extra: ExtraTensor) -> ExtraTensor:
    if not torch.isfinite(extra.values).all():
        layer, module, kind = extra.key
        raise AdapterRefused(
            RefusalCode.NOT_FINITE,
            f"The {kind} of {module} in layer {layer} has NaN or infinite values.",
            fix="The training diverged; give an earlier checkpoint.",
        )
    return extra


def no_effect() -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.NO_EFFECT,
        "The adapter changes nothing: all its deltas are zero.",
        fix="It seems untrained; give the trained one.",
    )
