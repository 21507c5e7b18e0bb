"""Where there is no GPU, Triton kernels run in its interpreter; triton asks when it is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
