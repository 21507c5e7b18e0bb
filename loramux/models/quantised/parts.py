"""The tensors of one quantised module, checked when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from loramux.errors import UnsupportedModel

Shape = Sequence[int]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Parts:
    """Tensors of a module by the end of their names; each is read when it is asked for."""

    def __init__(
        self,
        module: str,
        label: str,
        readers: Mapping[str, Callable[[], Tensor]],
        device: torch.device,
    ) -> None:
        """`label`: the format in words, for messages."""
        self.module = module
        self.label = label
        self._readers = readers
        self._device = device

    def __contains__(self, part: str) -> bool:
        return part in self._readers

    @property
    def names(self) -> list[str]:
        return sorted(self._readers)

    def take(
        self, part: str, dtypes: Iterable[torch.dtype] = FLOATS, *, shape: Shape | None = None
    ) -> Tensor:
        """Read a tensor; refuse it if it is missing, of another dtype or of another shape."""
        if part not in self._readers:
            raise UnsupportedModel(
                f"The weights lack {self.module}.{part}, which {self.label} needs."
            )
        tensor = self._readers[part]()
        valid = tuple(dtypes)
        if tensor.dtype not in valid:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in valid)
            raise self.wrong(part, f"is stored as {tensor.dtype}, and {self.label} has {names}")
        if shape is not None:
            self.check_shape(part, tensor, shape)
        return tensor.to(self._device)

    def matrix(self, part: str, dtypes: Iterable[torch.dtype] = FLOATS) -> Tensor:
        """Read a tensor of two dimensions."""
        tensor = self.take(part, dtypes)
        if tensor.ndim != 2:
            raise self.wrong(part, f"has shape {list(tensor.shape)}, not two dimensions")
        return tensor

    def check_shape(self, part: str, tensor: Tensor, shape: Shape) -> None:
        if tuple(tensor.shape) != tuple(shape):
            raise self.wrong(
                part,
                f"has shape {list(tensor.shape)} where {self.label} and the settings of "
                f"config.json ask for {list(shape)}",
            )

    def wrong(self, part: str, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.module}.{part} {reason}.")

    def group(self, size: int | None, inputs: int) -> int:
        """Return the inputs of a group; refuse a size that does not divide the inputs."""
        if size is not None and inputs % size:
            raise UnsupportedModel(
                f"{self.module} has {inputs} inputs, which groups of {size} (config.json) do not "
                "divide."
            )
        return size or inputs

    def damaged(self) -> UnsupportedModel:
        return UnsupportedModel(
            f"The weight of {self.module} has NaN or infinite elements ({self.label}): its codes "
            "or scales are damaged. Fetch the file again."
        )
