"""Wraps linear modules of a model, so that they add each row's adapters to their output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from loramux.kernels.linear import LinearMethod
from loramux.kernels.ops import LoraKernels, LoraRows, LoraWeights
from loramux.lora.batch import LoraBatch
from loramux.lora.extras import StepExtras
from loramux.lora.stacks import SiteKey


class LoraContext:
    """Selects what the wrapped modules compute in this forward; by default the base alone."""

    def __init__(self, kernels: LoraKernels) -> None:
        self.kernels = kernels
        self.bases: dict[SiteKey, LinearMethod] = {}
        """The wrapped modules, without adapters."""
        self.batch: LoraBatch | None = None
        self.extras: StepExtras | None = None
        """Extras of the batch's adapters; None if they have none."""
        self.merged: Mapping[SiteKey, LinearMethod] | None = None
        """Linears with merged adapters that replace the base for all rows of this forward."""


class LoraLinear(nn.Module):
    """A base linear that adds the adapters of the context's batch."""

    def __init__(self, base: LinearMethod, site: SiteKey, context: LoraContext) -> None:
        super().__init__()
        self.base = base
        self.site = site
        self.context = context

    @property
    def gemm_key(self) -> str:
        """The format of the base's weight."""
        return self.base.gemm_key

    @property
    def current(self) -> LinearMethod:
        """The linear of this forward: the base, or its merged copy."""
        merged = self.context.merged
        return self.base if merged is None else merged.get(self.site, self.base)

    def forward(self, x: Tensor) -> Tensor:
        y = self.current(x)
        extras = self.extras
        if extras is not None:
            extras.change_linear(self.site, self.base, x, y)
        self.add_adapters(y, x)
        return y

    def at_rows(self, rows: Tensor) -> Callable[[Tensor], Tensor]:
        return partial(self._forward_rows, rows.tolist())

    def _forward_rows(self, rows: list[int], x: Tensor) -> Tensor:
        y = self.current(x)
        context, extras = self.context, self.extras
        if extras is not None:
            extras.at_rows(rows).change_linear(self.site, self.base, x, y)
        if context.batch is not None and self.adapters:
            context.batch.keep_rows(rows, [self.site], context.kernels)
            self.add_adapters(y, x)
        return y

    @property
    def extras(self) -> StepExtras | None:
        """The parts of this forward, if any of them changes this linear."""
        extras = self.context.extras
        return extras if extras is not None and extras.changes_linear(self.site) else None

    @property
    def adapters(self) -> Sequence[tuple[LoraWeights, LoraRows]]:
        """Stacked weights and rows that this forward adds at this site."""
        batch = self.context.batch
        if batch is None or self.context.merged is not None:
            return ()
        return batch.sites.get(self.site, ())

    def add_adapters(self, y: Tensor, x: Tensor) -> None:
        for weights, rows in self.adapters:
            self.context.kernels.add_lora(y, x, weights, rows)


def attach(
    layers: Iterable[nn.Module], site_names: Iterable[str], kernels: LoraKernels
) -> LoraContext:
    """Wrap layer.<site name> of each layer; the returned context selects the adapters."""
    context = LoraContext(kernels)
    names = tuple(site_names)
    for index, layer in enumerate(layers):
        for name in names:
            site, base = (index, name), getattr(layer, name)
            context.bases[site] = base
            setattr(layer, name, LoraLinear(base, site, context))
    return context
