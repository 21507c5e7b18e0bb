"""The seam between the engine and what computes its steps and owns the memory of its rank."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from loramux.adapters.packed.image import AdapterImage
from loramux.memory.residency import AdapterMemory
from loramux.types.kv import KVLayout
from loramux.types.step import BeforeChoice, InFlightStep, StepPlan


class ExecutorMemory(AdapterMemory, Protocol):
    """The pages of an executor, which hold KV cache and adapters.

    A page is `page_bytes` bytes on every rank, and page ids mean the same on all of them.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def kv(self) -> KVLayout:
        """The layout of a page of KV cache."""
        ...

    @property
    def max_adapters(self) -> int | None:
        """Most adapters that steps can use; None: there is no limit."""
        ...

    def write_adapter(self, page_ids: list[int], image: AdapterImage) -> None:
        """Copy a packed adapter into pages, in order; any thread may call it."""
        ...

    def write_slice(self, page_ids: list[int], start: int, data: memoryview) -> None:
        """Copy a part of a packed adapter into pages, from byte `start` on; any thread may call it.

        For steps on the cores of the calling thread, which limits its work: a CPU alone has it.
        """
        ...

    def clear(self, page_ids: list[int]) -> None:
        """Zero pages, so that no data of an earlier owner can reach a new one."""
        ...


class Executor(ExecutorMemory, Protocol):
    """Computes step plans over its pages: on the CPU, on a GPU, or on several of them."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        ...

    @property
    def pool_bytes(self) -> int: ...

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Return whether the plan can be launched before the previous step's tokens are known."""
        ...

    def launch(self, plan: StepPlan, before_choice: BeforeChoice | None = None) -> InFlightStep:
        """Start the step; raise DoesNotFit when the device has no memory for it.

        `before_choice` is called before tokens are chosen, if possible while the forward pass runs.
        It may be called again when the step is repeated.
        """
        ...

    @property
    def kernels(self) -> str:
        """The name of the kernels of the next step."""
        ...

    @property
    def is_lacking(self) -> bool:
        """Whether a step ran slower than it could because something is not prepared yet."""
        ...

    def prepare_next(self, *, only_wanted: bool) -> bool:
        """Prepare one more thing, such as a CUDA graph; return False if nothing is left.

        `only_wanted`: what a step has lacked. No step may be in flight.
        """
        ...

    def logits(self, plan: StepPlan) -> dict[int, Tensor]:
        """Compute the logits of every token by sequence id, without sampling."""
        ...
