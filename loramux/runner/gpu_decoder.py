"""The decoder on a GPU: at most nine kernel launches a layer besides those of LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from loramux.kernels.linear import DENSE
from loramux.kernels.ops import DeviceAttentionPlan, DeviceKernels, Norm
from loramux.lora.augmented_step import AugmentedStep
from loramux.lora.extras_step import ExtrasStep
from loramux.models.augmented_linear import appended_rows
from loramux.models.decoder import Decoder
from loramux.models.forward import Layer, hidden_states
from loramux.models.layers import HeadNorm, RMSNorm
from loramux.runner.gemm.dispatch import open_dispatcher
from loramux.runner.gpu_extras_ops import ExtrasGpuOps, ExtrasLinearOps
from loramux.runner.gpu_ops import (
    AugmentedLinearOps,
    FusedLinearOps,
    GpuContext,
    GpuLinear,
    GpuOps,
    LoraStep,
    SegmentedLinearOps,
)
from loramux.types.kv import KVLayout


class GpuDecoder:
    """Computes hidden states and logits of a decoder."""

    def __init__(
        self, decoder: Decoder, kernels: DeviceKernels, layout: KVLayout, storage: Tensor
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._layout = layout
        self._storage = storage
        self._context = GpuContext(decoder, kernels.elementwise, layout, storage)
        self._all = decoder.describe(linear=partial(GpuLinear.of, decoder.config), norm=_norm)
        self._layers = self._all
        head = decoder.lm_head
        is_dense = head.gemm_key == DENSE and head.bias is None
        self._head = head.dequantised_rows() if is_dense else None
        self.gemms = open_dispatcher(storage.device, kernels.swiglu, decoder.config.activation)

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    @property
    def attention_dtype(self) -> torch.dtype:
        """The dtype in which queries are multiplied with keys."""
        return self._kernels.attention.attention_dtype(self.dtype, self._storage.dtype)

    @property
    def num_heads(self) -> int:
        return self._decoder.config.num_heads

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows of all layers; None stands for full attention."""
        return {_window(layer) for layer in self._all}

    @property
    def appended(self) -> list[list[Tensor]] | None:
        """Rows appended to the weights: [layers][fused linears] of [blocks, projections, 16, in]"""
        return appended_rows(self._decoder)

    @contextmanager
    def distinct_layers(self) -> Iterator[None]:
        """Compute few layers within the context: those that may use different kernel variants.

        Layers differ by window, and by their number, since Triton specializes on multiples of 16.
        """
        numbers: set[int] = set()
        for window in self.windows:
            same = [n for n, layer in enumerate(self._all) if _window(layer) == window]
            numbers |= set(same[:2])
        self._layers = [layer for number, layer in enumerate(self._all) if number in numbers]
        try:
            yield
        finally:
            self._layers = self._all

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: DeviceAttentionPlan,
        lora: LoraStep | AugmentedStep | None,
        extras: ExtrasStep | None = None,
    ) -> Tensor:
        """Compute the normed hidden state of every token; token_ids, positions [tokens] int32.

        `extras`: extras of adapters; `lora` is then on the segmented path.
        """
        if extras is None:
            ops = GpuOps(self._context, plan, self._linear_ops(lora))
        else:
            assert lora is not None and not isinstance(lora, AugmentedStep)
            elementwise = self._kernels.elementwise
            linears = ExtrasLinearOps(elementwise, lora, self.gemms, extras)
            ops = ExtrasGpuOps(self._context, plan, linears)
        return hidden_states(self._layers, ops, token_ids, positions)

    def logits(
        self, hidden: Tensor, extras: ExtrasStep | None = None, num_columns: int | None = None
    ) -> Tensor:
        """Compute the logits [tokens, vocab] in float32.

        `extras`: extras of adapters for these tokens; `num_columns`: of an
        adapter's vocabulary that is larger than the base's.
        """
        if extras is None:
            return self._decoder.logits(hidden)
        hidden = self._decoder.scaled(hidden)
        logits = self._decoder.lm_head(hidden)
        vocab_size = self._decoder.config.head_size
        if num_columns is not None and num_columns > vocab_size:
            wide = logits.new_full((len(hidden), num_columns), float("-inf"))
            wide[:, :vocab_size] = logits
            logits = wide
        extras.change_logits(logits, hidden)
        # A softcap would make numbers of tokens that a row's vocabulary does not have.
        is_missing = logits == float("-inf")
        return self._decoder.cap_logits(logits.float()).masked_fill_(is_missing, float("-inf"))

    def empty_logits(self, num_tokens: int) -> Tensor:
        """Allocate the output of `write_logits`, in the dtype that it needs."""
        config = self._decoder.config
        dtype = self.dtype if config.final_logit_softcap is None else torch.float32
        return self._storage.new_empty(num_tokens, config.head_size, dtype=dtype)

    def write_logits(self, hidden: Tensor, out: Tensor, extras: ExtrasStep | None = None) -> None:
        """Compute the logits into `out`, without a conversion to float32."""
        weight = self._head
        config = self._decoder.config
        # A classification head is too narrow for the dispatcher's kernels.
        if config.final_logit_softcap is None and weight is not None and not config.num_labels:
            hidden = self._decoder.scaled(hidden)
            self.gemms.linear(hidden, weight, out=out)
            if extras is not None:
                extras.change_logits(out, hidden)
        else:
            out.copy_(self.logits(hidden, extras))

    def _linear_ops(self, lora: LoraStep | AugmentedStep | None) -> FusedLinearOps:
        kernels = self._kernels
        if isinstance(lora, AugmentedStep):
            return AugmentedLinearOps(kernels.elementwise, kernels.augmented, lora, self.gemms)
        return SegmentedLinearOps(kernels.elementwise, lora, self.gemms)


def _window(layer: Layer[GpuLinear, Norm]) -> int | None:
    return layer.mixer.args.sliding_window


def _norm(norm: RMSNorm | HeadNorm) -> Norm:
    return Norm(norm.weight, norm.eps)
