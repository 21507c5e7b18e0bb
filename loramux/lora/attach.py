"""Makes chosen linear modules of any model add their row's adapters to what they compute."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from loramux.kernels.interface import LoraKernels
from loramux.lora.batch import LoraBatch
from loramux.lora.stacks import SiteKey


class LoraContext:
    """The batch that the wrapped modules are computing now; None: base rows only."""

    def __init__(self, kernels: LoraKernels) -> None:
        self.kernels = kernels
        self.batch: LoraBatch | None = None


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Module, site: SiteKey, context: LoraContext) -> None:
        super().__init__()
        self.base = base
        self.site = site
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        batch = self.context.batch
        if batch is not None:
            for weights, rows in batch.sites.get(self.site, ()):
                self.context.kernels.add_lora(y, x, weights, rows)
        return y


def attach(
    layers: Iterable[nn.Module], site_names: Iterable[str], kernels: LoraKernels
) -> LoraContext:
    """Wraps layer.<site name> of each layer; the context says what the next forward adds."""
    context = LoraContext(kernels)
    names = tuple(site_names)
    for index, layer in enumerate(layers):
        for name in names:
            setattr(layer, name, LoraLinear(getattr(layer, name), (index, name), context))
    return context
