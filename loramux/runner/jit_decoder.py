"""The decoder on a CPU with compiled loops: GEMMs with epilogues over reused buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from loramux.kernels.linear import LinearMethod
from loramux.kernels.ops import (
    Epilogue,
    JitAttentionPlan,
    JitKernels,
    LoraRows,
    LoraWeights,
    Norm,
    NormArrays,
    RotateWriteArrays,
    Rows,
    SequenceRows,
    empty_rows,
)
from loramux.lora.attach import LoraLinear
from loramux.lora.extras import StepExtras
from loramux.models.architectures import linears_of
from loramux.models.decoder import Decoder
from loramux.models.forward import Attention, DecoderOps, GatedMlp, hidden_states
from loramux.models.layers import HeadNorm, RMSNorm, Rotary
from loramux.models.packed_linear import PackedLinear
from loramux.runner.extras_ops import OpsWithExtras
from loramux.types.kv import KVLayout
from loramux.types.model import ATTENTION_BLOCK, LinearSpec

JitDecoderOps = DecoderOps[Rows, LinearMethod, NormArrays]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Activations of a step; every layer overwrites them, so that they stay in the caches."""

    qkv: Rows
    attended: Rows
    added: Rows
    gate_up: Rows
    mixed: Rows
    normed: Rows


@dataclass(frozen=True, slots=True)
class _Widths:
    qkv: int
    attended: int
    gate_up: int
    inner: int
    hidden: int

    def buffers(self, num_tokens: int) -> _Buffers:
        return _Buffers(
            qkv=empty_rows(num_tokens, self.qkv),
            attended=empty_rows(num_tokens, self.attended),
            added=empty_rows(num_tokens, self.hidden),
            gate_up=empty_rows(num_tokens, self.gate_up),
            mixed=empty_rows(num_tokens, self.inner),
            normed=empty_rows(num_tokens, self.hidden),
        )


class JitDecoder:
    """Runs a decoder whose linears have been packed and wrapped before it is made."""

    def __init__(
        self, decoder: Decoder, kernels: JitKernels, layout: KVLayout, storage: Tensor
    ) -> None:
        self.decoder = decoder
        self.kernels = kernels
        self.layout = layout
        self.storage = storage
        self.converts_kv = storage.dtype != torch.float32
        """Whether the KV cache has another dtype than the compiled loops."""
        self._layers = decoder.describe(linear=_same, norm=self._norm_arrays)
        first = self._layers[0]
        assert isinstance(first.mlp, GatedMlp), "experts have no compiled kernels"
        self.widths = _Widths(
            qkv=_base(first.mixer.qkv).out_features,
            attended=_base(first.mixer.o).in_features,
            gate_up=_base(first.mlp.gate_up).out_features,
            inner=_base(first.mlp.down).in_features,
            hidden=_base(first.mixer.qkv).in_features,
        )
        self.last_layer = len(self._layers) - 1
        # Unsampled tokens are skipped where no other token reads the activations.
        self.selecting_linears = tuple(
            (self.last_layer, spec.name)
            for spec in linears_of(decoder.config)
            if spec.is_added or spec.block != ATTENTION_BLOCK
        )
        """(layer, name) of the linears that compute the selected tokens alone."""

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        sequences: Sequence[SequenceRows],
        selected: Sequence[int] | None = None,
        extras: StepExtras | None = None,
    ) -> Tensor:
        """Compute the normed hidden states of the selected tokens (None: all), in their order.

        The keys and values of all tokens are stored.
        """
        plan = self.kernels.attention.plan(sequences, self.layout, self.storage.device)
        ops: JitDecoderOps = JitOps(self, plan, selected)
        if extras is not None:
            ops = OpsWithExtras(ops, extras, self.decoder, selected)
        return hidden_states(self._layers, ops, token_ids, positions).tensor

    def _norm_arrays(self, norm: RMSNorm | HeadNorm) -> NormArrays:
        return self.kernels.elementwise.norm_arrays(Norm(norm.weight, norm.eps))


class JitOps:
    """DecoderOps of one step over compiled loops."""

    def __init__(
        self, context: JitDecoder, plan: JitAttentionPlan, selected: Sequence[int] | None
    ) -> None:
        self._context = context
        self._kernels = context.kernels
        self._elementwise = context.kernels.elementwise
        self._activation = context.decoder.config.activation
        self._plan = plan
        self._selected = selected

    def embed(self, token_ids: Tensor, positions: Tensor) -> Rows:
        decoder = self._context.decoder
        self._rotations = [
            self._rotation(cast(Rotary, rotary), positions) for rotary in decoder.rotaries
        ]
        embedded: Tensor = decoder.embed_tokens(token_ids).contiguous()
        self._buffers = self._context.widths.buffers(len(token_ids))
        layout, qkv = self._context.layout, self._buffers.qkv.tensor
        heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
        num_queries, num_keys = heads.shape[1] - 2 * layout.num_kv_heads, layout.num_kv_heads
        self._queries = heads[:, :num_queries]
        self._keys = heads[:, num_queries : num_queries + num_keys]
        self._values = heads[:, num_queries + num_keys :]
        return Rows(embedded, embedded.numpy())

    def norm(self, residual: Rows, norm: NormArrays | None) -> Rows:
        if norm is None:
            return residual
        normed = self._buffers.normed
        self._elementwise.add_norm_into(None, residual.array, (norm, None), normed.array)
        return normed

    def linear_rotate_write(self, attention: Attention[LinearMethod, NormArrays], x: Rows) -> Rows:
        qkv = self._buffers.qkv
        self._linear(attention.qkv, x, qkv)
        if attention.wide_norms is not None:
            start = 0
            for norm in attention.wide_norms:
                size = len(norm.weight)
                columns = qkv.tensor[:, start : start + size]
                weight = torch.from_numpy(norm.weight)
                self._elementwise.norm_columns(columns, Norm(weight, float(norm.eps)))
                start += size
        rotation = self._rotations[attention.rope]
        layout, index = self._context.layout, attention.args.layer
        self._elementwise.rotate_write_into(qkv.array, attention.head_norm, rotation, layout, index)
        if self._context.converts_kv:
            self._plan.write_kv(self._context.storage, index, self._keys, self._values)
        return qkv

    def attend(self, attention: Attention[LinearMethod, NormArrays], q: Rows) -> Rows:
        attended = self._buffers.attended
        is_last = attention.args.layer == self._context.last_layer
        if not is_last or self._selected is None or len(self._selected):
            storage = self._context.storage
            self._plan.attend_into(attended, storage, self._queries, attention.args)
        return attended

    def select(self, attended: Rows, residual: Rows) -> tuple[Rows, Rows]:
        if self._selected is None:
            return attended, residual
        self._buffers = self._context.widths.buffers(len(self._selected))
        self._buffers.attended.array[:] = attended.array[self._selected]
        kept = residual.array[self._selected]
        return self._buffers.attended, Rows(torch.from_numpy(kept), kept)

    def linear_add_norm(
        self,
        linear: LinearMethod,
        x: Rows,
        residual: Rows,
        norm: NormArrays | None,
        after: NormArrays | None,
    ) -> Rows:
        added, normed = self._buffers.added, self._buffers.normed
        if not len(x.array):
            return normed
        if norm is None:
            self._linear(linear, x, added)
            self._elementwise.norm_add_into(added.array, residual.array, after)
            return residual
        if after is None:
            epilogue = self._elementwise.add_norm_epilogue(residual.array, norm, normed.array)
            self._linear(linear, x, added, epilogue)
        else:
            self._linear(linear, x, added)
            norms = norm, after
            self._elementwise.add_norm_into(added.array, residual.array, norms, normed.array)
        return normed

    def linear_glu(self, linear: LinearMethod, x: Rows) -> Rows:
        gate_up, mixed = self._buffers.gate_up, self._buffers.mixed
        if not len(x.array):
            return mixed
        if self._activation == "silu":
            self._linear(linear, x, gate_up, self._elementwise.silu_mul_epilogue(mixed.array))
        else:
            self._linear(linear, x, gate_up)
            mixed.tensor.copy_(self._elementwise.activate_mul(gate_up.tensor, self._activation))
        return mixed

    def _linear(
        self, module: LinearMethod, x: Rows, y: Rows, epilogue: Epilogue | None = None
    ) -> None:
        """Compute y = module(x) with its adapters, then the epilogue."""
        kernels, linear = self._kernels, module
        adapters: Sequence[tuple[LoraWeights, LoraRows]] = ()
        extras = None
        if isinstance(module, LoraLinear):
            linear, adapters, extras = module.current, module.adapters, module.extras
        matrix = linear.matrix_for(len(x.array)) if isinstance(linear, PackedLinear) else None
        if matrix is not None and kernels.linear is not None and extras is None:
            kernels.linear.linear_into(x.array, matrix, adapters, y.array, epilogue)
            return
        y.tensor.copy_(linear(x.tensor))
        if extras is not None and isinstance(module, LoraLinear):
            extras.change_linear(module.site, module.base, x.tensor, y.tensor)
        for weights, rows in adapters:
            kernels.lora.add_lora_rows(y.array, x.array, weights, rows)
        if epilogue is not None:
            self._elementwise.run_epilogue(epilogue, y.array)

    def _rotation(self, rotary: Rotary, positions: Tensor) -> RotateWriteArrays:
        cos, sin = self._elementwise.rotation(positions, rotary.frequencies, rotary.signs)
        slots = self._plan.slots.numpy()
        if self._context.converts_kv:
            # The compiled loop rotates alone: it writes no row without a slot.
            slots, storage = np.full_like(slots, -1), np.empty((0, 0), dtype=np.float32)
        else:
            storage = self._context.storage.numpy()
        return RotateWriteArrays(cos.numpy(), sin.numpy(), slots, storage)


def _same(layer: int, spec: LinearSpec, linear: LinearMethod) -> LinearMethod:
    return linear


def _base(linear: LinearMethod) -> LinearMethod:
    return linear.base if isinstance(linear, LoraLinear) else linear
