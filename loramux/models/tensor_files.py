"""Tensors of safetensors files, by name, with functions that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from loramux.errors import UnsupportedModel

Read = Callable[[], Tensor]
NamedRead = tuple[str, Read]


def open_tensors(file: Path, stack: ExitStack) -> Any:
    """Open a file until the stack is closed; no tensor is read."""
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except SafetensorError as error:
        raise UnsupportedModel(f"{file} is not a valid safetensors file: {error}.") from error


def stored_weights(files: list[Path]) -> Iterator[NamedRead]:
    """Yield the tensors as they are stored, file by file."""
    for file in files:
        with ExitStack() as stack:
            tensors = open_tensors(file, stack)
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, partial(tensors.get_tensor, name)
