"""Destinations of a checkpoint's tensors in the parameters of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.errors import UnsupportedModel
from loramux.types.model import RowMap

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The slot of a tensor in floating point."""

    target: Tensor
    """A view into a parameter; a leading dimension broadcasts the tensor."""
    shape: tuple[int, ...]
    """The shape that the checkpoint tensor must have."""
    plus: float = 0.0
    """Added to every element when the tensor is copied."""
    row_map: RowMap | None = None
    """Order of the tensor's rows in the target."""

    def fill(self, name: str, tensor: Tensor) -> None:
        check_tensor(name, tensor, self.shape, FLOAT_DTYPES)
        self.target.copy_(in_row_order(tensor, self.row_map))
        if self.plus:
            self.target.add_(self.plus)


def whole(target: Tensor, row_map: RowMap | None = None) -> TensorSlot:
    """Return the slot of a tensor that fills the target."""
    return TensorSlot(target.data, tuple(target.shape), row_map=row_map)


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise UnsupportedModel for another shape or dtype."""
    if tuple(tensor.shape) != shape:
        raise UnsupportedModel(
            f"{name} has shape {list(tensor.shape)} where config.json asks for {list(shape)}."
        )
    if tensor.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        known = f"{', '.join(others)} and {last}" if others else last
        raise UnsupportedModel(
            f"{name} is stored as {tensor.dtype}; only {known} weights can be served."
        )


def in_row_order(tensor: Tensor, row_map: RowMap | None) -> Tensor:
    return tensor if row_map is None else tensor[row_map.rows(len(tensor))]
