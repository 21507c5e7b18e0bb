"""The decoder over compiled loops, as a CPU runs it: the same linear layers, less between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from loramux.kernels.ops import (
    AttendArgs,
    Kernels,
    LoraRows,
    LoraWeights,
    PagedLayout,
    Rows,
    empty_rows,
)
from loramux.kernels.reference.elementwise import Norm
from loramux.lora.attach import LoraLinear
from loramux.models.decoder import Decoder, DecoderLayer
from loramux.models.layers import RMSNorm, Rotary
from loramux.models.packed_linear import SITES, PackedLinear, has_compiled_product

# Those behind the attention: what they compute of a row in the last layer, no other row reads.
_SITES_BEHIND_ATTENTION = ("o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class _Layer:
    """The norms as the compiled loops read them."""

    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module
    attention_norm: Any
    mlp_norm: Any
    after_attention: Any
    after_mlp: Any
    head_norm: Any
    args: AttendArgs


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Written again by each layer of a step, so that they stay in the caches."""

    qkv: Rows
    attended: Rows
    added: Rows
    gate_up: Rows
    mixed: Rows
    normed: Rows


class JitDecoder:
    """Made when all linear layers have been packed and wrapped: it calls them as they are then."""

    def __init__(
        self, decoder: Decoder, kernels: Kernels, layout: PagedLayout, storage: Tensor
    ) -> None:
        self._decoder = decoder
        self._fused: Any = kernels.fused
        self._attention: Any = kernels.attention
        self._lora: Any = kernels.lora
        self._sites = _compiled_sites(decoder)
        self._layout = layout
        self._storage = storage
        self._activation = decoder.config.activation
        self._layers = [self._layer(layer) for layer in decoder.layers]  # type: ignore[arg-type]
        self._norms = [layer.attention_norm for layer in self._layers[1:]]
        self._norms.append(self._arrays(decoder.norm))
        first = decoder.layers[0]
        self._widths = {site: _base(getattr(first, site)).weight.shape for site in SITES}
        last = len(self._layers) - 1
        self.last_sites = tuple((last, site) for site in _SITES_BEHIND_ATTENTION)
        """Where `hidden` computes no rows but those that it returns."""

    def hidden(
        self, token_ids: Tensor, positions: Tensor, plan: Any, rows: Sequence[int] | None = None
    ) -> Tensor:
        """As Decoder.forward: the normed hidden state of `rows`, in their order; None: of all.

        plan: of the attention. Keys and values are stored of all rows.
        """
        fused = self._fused
        whole = self._places(self._decoder.rotary, positions, plan)
        local = self._decoder.rotary_local
        places = whole, whole if local is None else self._places(local, positions, plan)
        embedded: Tensor = self._decoder.embed_tokens(token_ids).contiguous()
        hidden, buffers = embedded.numpy(), self._buffers(len(token_ids))
        q = self._queries(buffers.qkv.tensor)
        norms = self._layers[0].attention_norm, None
        fused.add_norm_into(None, hidden, norms, buffers.normed.array)
        for layer, next_norm in zip(self._layers, self._norms, strict=True):
            place = places[layer.args.sliding_window is not None]
            self._product(layer.qkv, buffers.normed, buffers.qkv)
            fused.rotate_write_into(
                buffers.qkv.array, layer.head_norm, place, self._layout, layer.args.layer
            )
            picked = rows if layer is self._layers[-1] else None
            if picked is not None and not len(picked):
                return embedded[:0]
            self._attention.attend_into(buffers.attended, self._storage, plan, q, layer.args)
            if picked is not None:
                hidden, buffers = self._pick(hidden, buffers, picked)
            self._add_attended(layer, next_norm, hidden, buffers)
        return buffers.normed.tensor

    def _add_attended(
        self, layer: _Layer, next_norm: Any, hidden: NDArray[np.float32], buffers: _Buffers
    ) -> None:
        """Adds the rest of the layer to `hidden`, and makes what the next one reads."""
        norms = layer.mlp_norm, layer.after_attention
        self._add_normed(layer.o, buffers.attended, buffers, hidden, norms)
        self._add_activated(layer.gate_up, buffers)
        norms = next_norm, layer.after_mlp
        self._add_normed(layer.down, buffers.mixed, buffers, hidden, norms)

    def _add_normed(
        self,
        module: nn.Module,
        x: Rows,
        buffers: _Buffers,
        hidden: NDArray[np.float32],
        norms: tuple[Any, Any],
    ) -> None:
        """hidden += module(x); buffers.normed = norm(hidden)"""
        norm, after = norms
        if after is None:
            work = self._fused.add_norm_work(hidden, norm, buffers.normed.array)
            self._product(module, x, buffers.added, work)
            return
        self._product(module, x, buffers.added)
        self._fused.add_norm_into(buffers.added.array, hidden, norms, buffers.normed.array)

    def _add_activated(self, module: nn.Module, buffers: _Buffers) -> None:
        """buffers.mixed = activation(gate) * up, both of them module(buffers.normed)"""
        if self._activation == "silu":
            work = self._fused.silu_mul_work(buffers.mixed.array)
            self._product(module, buffers.normed, buffers.gate_up, work)
            return
        self._product(module, buffers.normed, buffers.gate_up)
        mixed = self._fused.activate_mul(buffers.gate_up.tensor, self._activation)
        buffers.mixed.tensor.copy_(mixed)

    def _pick(
        self, hidden: NDArray[np.float32], buffers: _Buffers, rows: Sequence[int]
    ) -> tuple[NDArray[np.float32], _Buffers]:
        """Those rows of what the rest of a layer reads."""
        picked = self._buffers(len(rows))
        picked.attended.array[:] = buffers.attended.array[rows]
        return hidden[rows], picked

    def _product(self, module: nn.Module, x: Rows, y: Rows, work: Any = None) -> None:
        """y = module(x), and then the work on its rows."""
        linear: nn.Module = module
        adapters: Sequence[tuple[LoraWeights, LoraRows]] = ()
        if isinstance(module, LoraLinear):
            linear, adapters = module.current, module.adapters
        matrix = linear.matrix_for(len(x.array)) if isinstance(linear, PackedLinear) else None
        if matrix is not None:
            self._sites.multiply_add_into(x.array, matrix, adapters, y.array, work)
            return
        y.tensor.copy_(linear(x.tensor))
        for weights, rows in adapters:
            self._lora.add_lora_rows(y.array, x.array, weights, rows)
        if work is not None:
            self._fused.run_work(work, y.array)

    def _buffers(self, num_rows: int) -> _Buffers:
        widths = self._widths
        return _Buffers(
            qkv=empty_rows(num_rows, widths["qkv"][0]),
            attended=empty_rows(num_rows, widths["o"][1]),
            added=empty_rows(num_rows, widths["o"][0]),
            gate_up=empty_rows(num_rows, widths["gate_up"][0]),
            mixed=empty_rows(num_rows, widths["down"][1]),
            normed=empty_rows(num_rows, widths["qkv"][1]),
        )

    def _queries(self, qkv: Tensor) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, self._layout.head_dim)
        return heads[:, : heads.shape[1] - 2 * self._layout.num_kv_heads]

    def _places(self, rotary: Rotary, positions: Tensor, plan: Any) -> Any:
        cos, sin = self._fused.rotation(
            positions, rotary.frequencies, rotary.signs, rotary.attention_factor
        )
        arrays = cos.numpy(), sin.numpy(), plan.slots.numpy(), self._storage.numpy()
        return self._fused.RowPlaces(*arrays)

    def _layer(self, layer: DecoderLayer) -> _Layer:
        head_norm, after_attention = layer.head_norm, layer.after_attention_norm
        after_mlp = layer.after_mlp_norm
        return _Layer(
            qkv=layer.qkv,
            o=layer.o,
            gate_up=layer.gate_up,
            down=layer.down,
            attention_norm=self._arrays(layer.attention_norm),
            mlp_norm=self._arrays(layer.mlp_norm),
            after_attention=None if after_attention is None else self._arrays(after_attention),
            after_mlp=None if after_mlp is None else self._arrays(after_mlp),
            head_norm=None if head_norm is None else self._arrays(head_norm),
            args=AttendArgs(
                layer=layer.layer,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                softcap=layer.softcap,
            ),
        )

    def _arrays(self, norm: RMSNorm | Any) -> Any:
        return self._fused.arrays_of(Norm(norm.weight, norm.eps))


def _compiled_sites(decoder: Decoder) -> Any:
    """The products that know of adapters; None: others compute them."""
    if not has_compiled_product(decoder.dtype):
        return None
    from loramux.kernels.cpu_jit import linear as site_numba

    return site_numba


def _base(module: nn.Module) -> Any:
    return module.base if isinstance(module, LoraLinear) else module
