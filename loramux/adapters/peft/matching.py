"""Matches a LoRA config and the tensors of its file to the base, and makes the parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loramux.adapters.packed.extras import MODEL_LEVEL, ExtraKind, ExtraSpec
from loramux.adapters.peft.config import PeftLoraConfig
from loramux.adapters.peft.dora import row_factors
from loramux.adapters.peft.fused import Columns, FusedMaker
from loramux.adapters.peft.making import PartMaker, PartValues, check_matrix
from loramux.adapters.peft.names import FileTensors, Role, classify
from loramux.adapters.peft.parameters import plan_parameters
from loramux.adapters.peft.parts import AdapterParts, AdapterPlan, BaseWeights, LoraModule
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.adapters.peft.saved_modules import (
    check_saved,
    plan_replaced,
    refuse_classifiers,
)
from loramux.adapters.peft.targets import ModulePlan, is_saved, plan_modules
from loramux.adapters.peft.tensors import (
    Pair,
    check_modules_exist,
    check_rank,
    check_same_modules,
    check_shapes,
    pair_up,
)
from loramux.adapters.peft.vocabulary import (
    EMBEDDING_PATH,
    HEAD_PATH,
    PATHS,
    LowRank,
    plan_vocabulary,
    vocabulary_targets,
)
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo

if TYPE_CHECKING:
    import torch

TYPICAL_RANK = 8


@dataclass(frozen=True, slots=True)
class MatchedTensors:
    """The parts of an adapter: `pairs[i]` and `magnitudes[i]` belong to `plans[i]`."""

    plans: tuple[ModulePlan, ...]
    pairs: tuple[Pair, ...]
    unused: tuple[str, ...] = ()
    magnitudes: tuple[TensorEntry, ...] = ()
    """Empty without DoRA."""
    makers: tuple[PartMaker, ...] = ()
    only_alone: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        return {(plan.target.layer, plan.target.projection): plan.rank for plan in self.plans}

    @property
    def extras(self) -> tuple[ExtraSpec, ...]:
        return tuple(spec for maker in self.makers for spec in maker.specs)

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        entries = [entry for pair in self.pairs for entry in (pair.a, pair.b)]
        entries += self.magnitudes
        entries += [entry for maker in self.makers for entry in maker.used]
        # Tied modules are made of the same tensors.
        return tuple({entry.name: entry for entry in entries}.values())

    @property
    def are_views(self) -> bool:
        return not self.magnitudes and not any(maker.computes for maker in self.makers)

    def make_parts(
        self, tensors: Mapping[str, torch.Tensor], base_weights: BaseWeights | None
    ) -> AdapterParts:
        factors = {} if base_weights is None else self._factors(tensors, base_weights)
        modules = []
        for plan, pair in zip(self.plans, self.pairs, strict=True):
            b = tensors[pair.b.name]
            found = factors.get(plan.target.path)
            modules.append(
                LoraModule(
                    target=plan.target,
                    rank=plan.rank,
                    alpha=plan.alpha,
                    scale=plan.scale,
                    a=tensors[pair.a.name],
                    b=b if found is None else b.float() * found[:, None],
                )
            )
        values = PartValues(tensors, base_weights, factors)
        extras = tuple(part for maker in self.makers for part in maker.make(values))
        return AdapterParts(tuple(modules), extras)

    def _factors(
        self, tensors: Mapping[str, torch.Tensor], base: BaseWeights
    ) -> dict[str, torch.Tensor]:
        if not self.magnitudes:
            return {}
        return {
            plan.target.path: row_factors(
                plan.target.path,
                base.weight(plan.target.layer, plan.target.projection),
                (tensors[pair.a.name], tensors[pair.b.name], plan.scale),
                tensors[magnitude.name],
            )
            for plan, pair, magnitude in zip(self.plans, self.pairs, self.magnitudes, strict=True)
        }


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The modules of the base that a LoRA config targets."""

    config: PeftLoraConfig
    modules: tuple[ModulePlan, ...]
    """The embedding and the head are the last, if they are targeted."""
    base: BaseModelInfo

    def match(self, entries: Sequence[TensorEntry], *, max_rank: int | None) -> MatchedTensors:
        config, base = self.config, self.base
        file = classify(entries)
        refuse_classifiers([*file.of(Role.WEIGHT), *file.of(Role.BIAS)], self.base)
        pairs = self._pairs(file)
        for plan in self.modules:
            check_rank(pairs[plan.target.path], plan, max_rank)
        check_modules_exist(file.of(Role.TOKENS), PATHS, base)
        magnitudes = self._beside_pairs(file, Role.MAGNITUDE)
        lora_biases = self._beside_pairs(file, Role.LORA_BIAS)
        inner = tuple(plan for plan in self.modules if plan.target.layer != MODEL_LEVEL)
        makers, unused = self._replaced(file)
        makers += self._fused(file, inner, lora_biases)
        makers += plan_vocabulary(
            file,
            base,
            self._low_ranks(pairs, magnitudes, lora_biases),
            saved=config.modules_to_save,
            tokens=config.trainable_token_indices,
            ties_low_rank=config.ensure_weight_tying and base.tie_embeddings,
        )
        used = {entry.name for maker in makers for entry in maker.used}
        unused += [
            entry.name
            for role in (Role.FROZEN_WEIGHT, Role.TOKENS)
            for entry in file.of(role).values()
            if entry.name not in used and entry.name not in unused
        ]
        replaced = describe_replaced([spec for maker in makers for spec in maker.specs])
        return MatchedTensors(
            plans=inner,
            pairs=tuple(pairs[plan.target.path] for plan in inner),
            unused=(*file.unused, *unused),
            magnitudes=tuple(
                magnitudes[plan.target.path] for plan in inner if plan.target.path in magnitudes
            ),
            makers=tuple(makers),
            only_alone=config.only_alone or (f"it replaces {replaced}" if replaced else ""),
            warnings=(*self._warn_of_size(makers), *_warn_of_vision(file)),
        )

    def _pairs(self, file: FileTensors) -> dict[str, Pair]:
        linear = pair_up(file)
        embedding = pair_up(file, (Role.EMBEDDING_A, Role.EMBEDDING_B))
        targets = {target.path: target for target in self.base.targets}
        check_shapes({**linear, **embedding}, targets)
        check_modules_exist(linear, [*targets, HEAD_PATH], self.base)
        check_modules_exist(embedding, [EMBEDDING_PATH], self.base)
        pairs = {**linear, **embedding}
        check_same_modules(pairs, self.modules)
        return pairs

    def _beside_pairs(self, file: FileTensors, role: Role) -> dict[str, TensorEntry]:
        """Return the magnitudes or the biases of lora_B; each module has one or none has."""
        is_dora = role is Role.MAGNITUDE
        field = "use_dora" if is_dora else "lora_bias"
        is_set = self.config.use_dora if is_dora else self.config.lora_bias
        found = file.of(role)
        targets = {plan.target.path: plan.target for plan in self.modules}
        if found and not is_set:
            raise AdapterRefused(
                RefusalCode.DORA_TENSORS if is_dora else RefusalCode.BIAS_TENSORS,
                f"The file holds {'DoRA magnitudes' if is_dora else 'biases of lora_B'}, though "
                f"the config does not set {field}.",
                fix=f"Set {field} in adapter_config.json.",
            )
        if untargeted := sorted(found.keys() - targets.keys()):
            raise AdapterRefused(
                RefusalCode.UNTARGETED_TENSORS,
                f"The file holds tensors of {field} for modules that the config does not target: "
                f"{name_some(untargeted)}.",
                fix="Make target_modules, exclude_modules and layers_to_transform fit the file.",
            )
        if is_set and (missing := [path for path in targets if path not in found]):
            raise AdapterRefused(
                RefusalCode.MISSING_TENSORS,
                f"The config sets {field}, and the file has no tensors for it in "
                f"{name_some(missing)}.",
                fix=f"Correct {field}, or save the adapter again.",
            )
        for path, entry in found.items():
            if targets[path].layer != MODEL_LEVEL:
                check_matrix(entry, (targets[path].out_features,), path)
        return found

    def _replaced(self, file: FileTensors) -> tuple[list[PartMaker], list[str]]:
        """Return makers of whole projections and norms, and the names of tensors not needed."""
        saved, weights = self.config.modules_to_save, file.of(Role.WEIGHT)
        inside = {path: entry for path, entry in weights.items() if path not in PATHS}
        frozen = {
            path: entry for path, entry in file.of(Role.FROZEN_WEIGHT).items() if path not in PATHS
        }
        below = [entry.name for path, entry in frozen.items() if not is_saved(saved, path)]
        below += [
            inside[plan.target.path].name for plan in self.modules if plan.target.path in inside
        ]
        if below:
            raise AdapterRefused(
                RefusalCode.FULL_WEIGHTS,
                f"The file holds whole weights below a LoRA: {name_some(sorted(below))}.",
                fix="Save the adapter with PEFT's save_pretrained.",
            )
        makers = plan_replaced(inside, self.base)
        check_saved(saved, weights, self.base)
        return makers, [entry.name for entry in frozen.values()]

    def _fused(
        self,
        file: FileTensors,
        plans: Iterable[ModulePlan],
        lora_biases: Mapping[str, TensorEntry],
    ) -> list[PartMaker]:
        """Return makers of the gains and biases of fused linears."""
        biases = file.of(Role.BIAS)
        targets = {target.path: target for target in self.base.targets}
        for path, entry in biases.items():
            if path not in targets or targets[path].projection not in self.base.biased:
                raise AdapterRefused(
                    RefusalCode.BIAS_TENSORS,
                    f"The file holds a bias of {path}, which has none in this base.",
                    fix="Serve the adapter on the base that it was trained on.",
                )
            check_matrix(entry, (targets[path].out_features,), path)
        planned = {plan.target.path: plan for plan in plans}
        if not (biases or lora_biases or self.config.use_dora):
            return []
        places = {
            name: (linear, columns.start)
            for linear in self.base.linears
            for name, columns in linear.columns.items()
        }
        columns: dict[tuple[int, str], list[Columns]] = {}
        for path, target in targets.items():
            plan = planned.get(path)
            linear, start = places[target.projection]
            part = Columns(
                path,
                target.projection,
                start,
                target.out_features,
                has_factors=plan is not None and self.config.use_dora,
                is_biased=target.projection in self.base.biased,
                bias=biases.get(path),
                lora_bias=lora_biases.get(path),
                lora_scale=0.0 if plan is None else plan.scale,
            )
            if part.has_factors or part.changes_bias:
                columns.setdefault((target.layer, linear.name), []).append(part)
        widths = {linear.name: linear.num_outputs for linear in self.base.linears}
        return [
            FusedMaker(layer, name, widths[name], tuple(parts))
            for (layer, name), parts in columns.items()
        ]

    def _low_ranks(
        self,
        pairs: Mapping[str, Pair],
        magnitudes: Mapping[str, TensorEntry],
        lora_biases: Mapping[str, TensorEntry],
    ) -> dict[str, LowRank]:
        """Return the LoRA of the embedding and of the head."""
        return {
            path: LowRank(
                plan.rank,
                plan.scale,
                pairs[path].a,
                pairs[path].b,
                magnitudes.get(path),
                lora_biases.get(path),
            )
            for plan in self.modules
            if plan.target.layer == MODEL_LEVEL
            for path in (plan.target.path,)
        }

    def _warn_of_size(self, makers: Sequence[PartMaker]) -> list[str]:
        specs = [spec for maker in makers for spec in maker.specs]
        elements = sum(
            spec.num_rows * spec.width for spec in specs if spec.kind is ExtraKind.WEIGHT
        )
        if not elements:
            return []
        widths = sum(target.in_features + target.out_features for target in self.base.targets)
        count = elements / (TYPICAL_RANK * widths)
        return [
            f"It replaces {describe_replaced(specs)}: {2 * elements / 2**20:.1f} MiB in 16 bits, "
            f"{count:.1f} times an adapter of rank {TYPICAL_RANK} on all layers."
        ]


def _warn_of_vision(file: FileTensors) -> list[str]:
    if not file.of_vision:
        return []
    return [
        f"{len(file.of_vision)} tensors are not used: they change the image encoder, which text "
        f"does not pass through ({name_some(sorted(file.of_vision), limit=2)})."
    ]


def plan_lora(config: PeftLoraConfig, base: BaseModelInfo) -> AdapterPlan:
    """Find what a config targets in this base; raise AdapterRefused."""
    if not config.target_parameters:
        return plan_modules_of(config, base)
    inner = plan_modules_of(config, base) if config.target_modules else None
    return plan_parameters(config, base, inner)


def plan_modules_of(config: PeftLoraConfig, base: BaseModelInfo) -> LoraPlan:
    """Find the modules that a config targets in this base; raise AdapterRefused."""
    embedding, head = vocabulary_targets(base)
    plans = plan_modules(
        config,
        base.targets,
        embedding=embedding,
        head=head,
        are_tied=base.tie_embeddings,
        prefixes=base.path_prefixes,
    )
    if config.invocation_tokens and any(plan.target == embedding for plan in plans):
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_TARGET,
            f"An aLoRA cannot target {EMBEDDING_PATH}; PEFT refuses it too.",
            fix="Train it without the embedding.",
        )
    return LoraPlan(config, plans, base)


def describe_replaced(specs: Iterable[ExtraSpec]) -> str:
    """Return the modules with a whole weight or rows of it, in words; empty: none."""
    found: dict[str, int] = {}
    for spec in specs:
        if spec.kind in (ExtraKind.WEIGHT, ExtraKind.ROWS):
            name = spec.module if spec.kind is ExtraKind.WEIGHT else f"tokens of {spec.module}"
            found[name] = found.get(name, 0) + 1
    return ", ".join(
        name if count == 1 else f"{name} in {count} layers" for name, count in found.items()
    )
