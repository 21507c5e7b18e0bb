"""The seam between the engine and what computes its steps."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from loramux.types.step import BeforeChoice, InFlightStep, StepPlan


class Executor(Protocol):
    """Computes step plans over one page pool: on the CPU, on a GPU, or on several of them."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the KV cache and of the weights."""
        ...

    @property
    def pool_bytes(self) -> int: ...

    @property
    def pool_address(self) -> int: ...

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
