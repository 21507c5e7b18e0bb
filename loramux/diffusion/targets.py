"""The modules of a pipeline that an adapter may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

Target = nn.Linear | nn.Conv2d


def component_targets(net: nn.Module) -> dict[str, Target]:
    """Return the linear layers and plain convolutions of a component by path."""
    return {path: module for path, module in net.named_modules() if _is_target(module)}


def pipeline_targets(pipe: Any, components: tuple[str, ...]) -> Mapping[str, Mapping[str, Target]]:
    """Return the targets of the components that the pipeline has."""
    nets = {name: getattr(pipe, name, None) for name in components}
    return {name: component_targets(net) for name, net in nets.items() if net is not None}


def _is_target(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros"
    return isinstance(module, nn.Linear)
