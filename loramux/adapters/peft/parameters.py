"""LoRA of bare parameters (target_parameters): fused experts and routers.

PEFT stores the low rank of all experts of a layer as one pair. Row e * r + k of A is rank k of
expert e, column k * E + e of B as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loramux.adapters.packed.extras import ExtraSpec
from loramux.adapters.peft.config import PeftLoraConfig
from loramux.adapters.peft.names import FileTensors, Role, classify, text_tensor_name
from loramux.adapters.peft.parts import (
    AdapterContents,
    AdapterParts,
    AdapterPlan,
    BaseWeights,
    LoraModule,
)
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.adapters.peft.targets import ModulePlan, plan_module, values_by_pattern
from loramux.adapters.peft.tensors import OTHER_BASE_FIX, Pair, pair_up
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, LinearSpec, TargetModule

if TYPE_CHECKING:
    import torch

GATE_UP, DOWN, ROUTER = "experts.gate_up_proj", "experts.down_proj", "gate.weight"
PARAMETERS = (GATE_UP, DOWN, ROUTER)
_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe)\."
    r"(?P<place>experts\.base_layer|experts|gate)\."
)
# transformers 5 names the mixture of experts of every family like this.
_MODULE = "model.layers.{}.mlp."


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of one layer, and the linears of the base that it consists of."""

    name: str
    """One of PARAMETERS."""
    layer: int
    members: tuple[tuple[TargetModule, ...], ...]
    """The projections of each expert, whose outputs follow each other; the router is one expert."""

    @property
    def path(self) -> str:
        return _MODULE.format(self.layer) + self.name

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of an expert."""
        return self.members[0][0].in_features, sum(one.out_features for one in self.members[0])


@dataclass(frozen=True, slots=True)
class ParameterPair:
    """The tensors of a parameter."""

    parameter: Parameter
    plan: ModulePlan
    pair: Pair
    is_swapped: bool
    """A is over the outputs and B over the inputs, as PEFT stored it before 0.19.1."""

    def modules(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[LoraModule]:
        count, rank = len(self.parameter.members), self.plan.rank
        a_of_all, b_of_all = (tensors[entry.name] for entry in (self.pair.a, self.pair.b))
        a_of_all = a_of_all.view(count, rank, -1)
        b_of_all = b_of_all.view(-1, rank, count)
        for number, members in enumerate(self.parameter.members):
            a, b = a_of_all[number], b_of_all[:, :, number]
            if self.is_swapped:
                a, b = b.t(), a.t()
            start = 0
            for target in members:
                rows = slice(start, start + target.out_features)
                start = rows.stop
                yield LoraModule(
                    target=target,
                    rank=rank,
                    alpha=self.plan.alpha,
                    scale=self.plan.scale,
                    a=a.contiguous(),
                    b=b[rows].contiguous(),
                )


@dataclass(frozen=True, slots=True)
class ParameterContents:
    """The modules of an adapter that a LoRA of modules describes, and its parameters."""

    base: BaseModelInfo
    modules: AdapterContents | None
    parameters: tuple[ParameterPair, ...]

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        found = {} if self.modules is None else dict(self.modules.ranks)
        for one in self.parameters:
            for members in one.parameter.members:
                found |= {(target.layer, target.projection): one.plan.rank for target in members}
        return found

    @property
    def extras(self) -> tuple[ExtraSpec, ...]:
        return () if self.modules is None else self.modules.extras

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        own = [entry for one in self.parameters for entry in (one.pair.a, one.pair.b)]
        return (*(() if self.modules is None else self.modules.used), *own)

    @property
    def unused(self) -> tuple[str, ...]:
        return () if self.modules is None else self.modules.unused

    @property
    def only_alone(self) -> str:
        return "" if self.modules is None else self.modules.only_alone

    @property
    def warnings(self) -> tuple[str, ...]:
        return () if self.modules is None else self.modules.warnings

    @property
    def are_views(self) -> bool:
        return False

    def make_parts(
        self, tensors: Mapping[str, torch.Tensor], base_weights: BaseWeights | None
    ) -> AdapterParts:
        inner = AdapterParts(())
        if self.modules is not None:
            inner = self.modules.make_parts(tensors, base_weights)
        found = [*inner.modules]
        found += [module for one in self.parameters for module in one.modules(tensors)]
        place = {target.path: number for number, target in enumerate(self.base.targets)}
        found.sort(key=lambda module: place[module.target.path])
        return AdapterParts(tuple(found), inner.extras)


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """What a config with target_parameters asks of this base."""

    config: PeftLoraConfig
    base: BaseModelInfo
    modules: AdapterPlan | None
    """The plan of target_modules; None: it names none."""
    plans: tuple[tuple[Parameter, ModulePlan], ...]

    def match(self, entries: Sequence[TensorEntry], *, max_rank: int | None) -> ParameterContents:
        has_router = any(parameter.name == ROUTER for parameter, _ in self.plans)
        own: list[TensorEntry] = []
        others: list[TensorEntry] = []
        for entry in entries:
            match = _TENSOR.match(text_tensor_name(entry.name) or "")
            is_own = match is not None and (match["place"] != "gate" or has_router)
            (own if is_own else others).append(entry)
        inner = None
        if self.modules is not None:
            inner = self.modules.match(others, max_rank=max_rank)
        elif others:
            raise AdapterRefused(
                RefusalCode.UNTARGETED_TENSORS,
                f"The file holds tensors that the config does not target: "
                f"{name_some(sorted(entry.name for entry in others))}.",
                fix="Make target_modules and target_parameters fit the file.",
            )
        pairs = self._pairs(classify(own))
        for one in pairs:
            if max_rank is not None and one.plan.rank > max_rank:
                raise AdapterRefused(
                    RefusalCode.RANK_OVER_CAP,
                    f"{one.parameter.path} has rank {one.plan.rank}; this server takes at most "
                    f"{max_rank}.",
                    fix="Raise the server's rank limit, or train with a smaller rank.",
                )
        return ParameterContents(self.base, inner, pairs)

    def _pairs(self, file: FileTensors) -> tuple[ParameterPair, ...]:
        strange = [
            entry.name
            for role, found in file.by_role.items()
            if role not in (Role.LORA_A, Role.LORA_B)
            for entry in found.values()
        ]
        if strange:
            raise AdapterRefused(
                RefusalCode.UNKNOWN_TENSORS,
                f"The file holds tensors of unknown meaning: {name_some(sorted(strange))}.",
                fix="A LoRA of parameters has lora_A and lora_B alone; save it again.",
            )
        found: dict[tuple[int, str], Pair] = {}
        for path, pair in pair_up(file).items():
            match = _TENSOR.match(f"base_model.model.{path}.")
            assert match is not None, "the tensors were chosen by this pattern"
            found[int(match["layer"]), match["place"]] = pair
        places = self._places()
        if left := sorted(found.keys() - places.keys()):
            raise AdapterRefused(
                RefusalCode.UNTARGETED_TENSORS,
                f"The file holds tensors of parameters that the config does not target: "
                f"{name_some([f'layer {layer} {place}' for layer, place in left])}.",
                fix="Make target_parameters fit the file, and serve it on its own base.",
            )
        if missing := [one.path for key, (one, _) in places.items() if key not in found]:
            raise AdapterRefused(
                RefusalCode.MISSING_TENSORS,
                f"The config targets parameters that the file has no tensors for: "
                f"{name_some(missing)}.",
                fix="Make target_parameters fit the file.",
            )
        shown: dict[bool, list[set[bool]]] = {False: [], True: []}
        for key, (parameter, plan) in places.items():
            shown[parameter.name == ROUTER].append(_orientations(parameter, plan, found[key]))
        swapped = {is_router: _is_swapped(sets) for is_router, sets in shown.items() if sets}
        return tuple(
            ParameterPair(parameter, plan, found[key], swapped[parameter.name == ROUTER])
            for key, (parameter, plan) in places.items()
        )

    def _places(self) -> dict[tuple[int, str], tuple[Parameter, ModulePlan]]:
        """Return the place of each parameter in the names of the file, by layer."""
        has_down = any(parameter.name == DOWN for parameter, _ in self.plans)
        # PEFT wraps the parameters of a module in their order: the inner one is the base layer.
        names = {
            ROUTER: "gate",
            GATE_UP: "experts.base_layer" if has_down else "experts",
            DOWN: "experts",
        }
        return {(one.layer, names[one.name]): (one, plan) for one, plan in self.plans}


def plan_parameters(
    config: PeftLoraConfig, base: BaseModelInfo, modules: AdapterPlan | None
) -> ParameterPlan:
    """Find the parameters that a config targets in this base; raise AdapterRefused."""
    if config.use_dora or config.lora_bias:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            "target_parameters cannot be combined with use_dora or lora_bias; PEFT refuses it too.",
            fix="Train the adapter without one of them.",
        )
    known = list(_parameters(base))
    chosen = [
        parameter
        for parameter in known
        if any(
            parameter.path == name or parameter.path.endswith(f".{name}")
            for name in config.target_parameters
        )
    ]
    strange = [
        name
        for name in config.target_parameters
        if not any(f".{one.path}".endswith(f".{name}") for one in chosen)
    ]
    if strange:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            f"target_parameters names {name_some(strange)}, which this base does not have as "
            "experts or router.",
            fix=OTHER_BASE_FIX,
        )
    paths = [parameter.path for parameter in chosen]
    ranks = values_by_pattern("rank_pattern", config.rank_pattern, paths)
    alphas = values_by_pattern("alpha_pattern", config.alpha_pattern, paths)
    plans = tuple(
        (
            parameter,
            plan_module(
                config,
                replace(parameter.members[0][0], path=parameter.path),
                rank=config.r if rank is None else rank,
                alpha=config.lora_alpha if alpha is None else alpha,
            ),
        )
        for parameter, rank, alpha in zip(chosen, ranks, alphas, strict=True)
    )
    return ParameterPlan(config, base, modules, plans)


def _parameters(base: BaseModelInfo) -> Iterator[Parameter]:
    """Yield the parameters of each layer in the order of PEFT's file."""
    targets = {(target.layer, target.projection): target for target in base.targets}
    experts = [spec for spec in base.linears if spec.expert is not None]
    gated = [spec for spec in experts if spec.is_gated]
    down = [spec for spec in experts if not spec.is_gated]
    routers = [spec for spec in base.linears if spec.projections == ("gate",)] if experts else []
    for layer in range(base.num_layers if experts else 0):

        def members(
            specs: Sequence[LinearSpec], layer: int = layer
        ) -> tuple[tuple[TargetModule, ...], ...]:
            return tuple(tuple(targets[layer, name] for name in spec.projections) for spec in specs)

        yield Parameter(ROUTER, layer, members(routers))
        yield Parameter(GATE_UP, layer, members(gated))
        yield Parameter(DOWN, layer, members(down))


def _orientations(parameter: Parameter, plan: ModulePlan, pair: Pair) -> set[bool]:
    """Return whether A is over the outputs, as far as the shapes show it.

    Raises AdapterRefused for shapes of another base.
    """
    num_inputs, num_outputs = parameter.sizes
    ranks = plan.rank * len(parameter.members)
    found = {
        is_swapped
        for is_swapped, (of_a, of_b) in (
            (False, (num_inputs, num_outputs)),
            (True, (num_outputs, num_inputs)),
        )
        if (pair.a.shape, pair.b.shape) == ((ranks, of_a), (of_b, ranks))
    }
    if not found:
        raise AdapterRefused(
            RefusalCode.WRONG_SHAPE,
            f"{parameter.path} has {len(parameter.members)} x [{num_outputs}, {num_inputs}] in "
            f"this base and rank {plan.rank} in the config; lora_A has shape "
            f"{list(pair.a.shape)} and lora_B {list(pair.b.shape)}.",
            fix=OTHER_BASE_FIX,
        )
    return found


def _is_swapped(found: Sequence[set[bool]]) -> bool:
    """Return the orientation of a file, which one version of PEFT wrote."""
    shared = {False, True}.intersection(*found)
    if len(shared) == 1:
        return shared.pop()
    raise AdapterRefused(
        RefusalCode.WRONG_SHAPE,
        "The weights have as many inputs as outputs, so that the shapes do not show which of them "
        "lora_A is over."
        if shared
        else "lora_A is over the inputs in some parameters and over the outputs in others.",
        fix="Train the adapter on gate_up_proj and down_proj together, or name the experts.",
    )
