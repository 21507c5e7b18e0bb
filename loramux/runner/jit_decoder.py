"""The decoder over compiled loops, as a CPU runs it: the same linear layers, less between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from loramux.kernels.ops import (
    Array,
    AttendArgs,
    Epilogue,
    JitAttentionPlan,
    JitKernels,
    LoraRows,
    LoraWeights,
    Norm,
    NormArrays,
    PagedLayout,
    RotateWriteArrays,
    Rows,
    SequenceRows,
    empty_rows,
)
from loramux.lora.attach import LoraLinear
from loramux.models.decoder import Decoder, DecoderLayer
from loramux.models.layers import HeadNorm, RMSNorm, Rotary
from loramux.models.packed_linear import SITES, PackedLinear

# Those behind the attention: what they compute of a row in the last layer, no other row reads.
_SITES_BEHIND_ATTENTION = ("o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class _Layer:
    """The norms as the compiled loops read them."""

    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module
    attention_norm: NormArrays
    mlp_norm: NormArrays
    after_attention: NormArrays | None
    after_mlp: NormArrays | None
    head_norm: NormArrays | None
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
        self, decoder: Decoder, kernels: JitKernels, layout: PagedLayout, storage: Tensor
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._layout = layout
        self._storage = storage
        self._activation = decoder.config.activation
        self._layers = [self._layer(layer) for layer in decoder.layers]  # type: ignore[arg-type]
        self._norms = [layer.attention_norm for layer in self._layers[1:]]
        self._norms.append(self._arrays(decoder.norm))
        first = decoder.layers[0]
        self._widths = {site: _weight(getattr(first, site)).shape for site in SITES}
        last = len(self._layers) - 1
        self.last_sites = tuple((last, site) for site in _SITES_BEHIND_ATTENTION)
        """Where `hidden` computes no rows but those that it returns."""

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        sequences: Sequence[SequenceRows],
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """As Decoder.forward: the normed hidden state of `rows`, in their order; None: of all.

        Keys and values are stored of all rows.
        """
        elementwise = self._kernels.elementwise
        plan = self._kernels.attention.plan(sequences, self._layout, self._storage.device)
        whole = self._places(self._decoder.rotary, positions, plan)
        local = self._decoder.rotary_local
        places = whole, whole if local is None else self._places(local, positions, plan)
        embedded: Tensor = self._decoder.embed_tokens(token_ids).contiguous()
        hidden, buffers = embedded.numpy(), self._buffers(len(token_ids))
        q = self._queries(buffers.qkv.tensor)
        norms = self._layers[0].attention_norm, None
        elementwise.add_norm_into(None, hidden, norms, buffers.normed.array)
        for layer, next_norm in zip(self._layers, self._norms, strict=True):
            place = places[layer.args.sliding_window is not None]
            self._product(layer.qkv, buffers.normed, buffers.qkv)
            elementwise.rotate_write_into(
                buffers.qkv.array, layer.head_norm, place, self._layout, layer.args.layer
            )
            picked = rows if layer is self._layers[-1] else None
            if picked is not None and not len(picked):
                return embedded[:0]
            plan.attend_into(buffers.attended, self._storage, q, layer.args)
            if picked is not None:
                hidden, buffers = self._pick(hidden, buffers, picked)
            self._add_attended(layer, next_norm, hidden, buffers)
        return buffers.normed.tensor

    def _add_attended(
        self, layer: _Layer, next_norm: NormArrays, hidden: Array, buffers: _Buffers
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
        hidden: Array,
        norms: tuple[NormArrays, NormArrays | None],
    ) -> None:
        """hidden += module(x); buffers.normed = norm(hidden)"""
        elementwise = self._kernels.elementwise
        norm, after = norms
        if after is None:
            epilogue = elementwise.add_norm_epilogue(hidden, norm, buffers.normed.array)
            self._product(module, x, buffers.added, epilogue)
            return
        self._product(module, x, buffers.added)
        elementwise.add_norm_into(buffers.added.array, hidden, norms, buffers.normed.array)

    def _add_activated(self, module: nn.Module, buffers: _Buffers) -> None:
        """buffers.mixed = activation(gate) * up, both of them module(buffers.normed)"""
        if self._activation == "silu":
            epilogue = self._kernels.elementwise.silu_mul_epilogue(buffers.mixed.array)
            self._product(module, buffers.normed, buffers.gate_up, epilogue)
            return
        self._product(module, buffers.normed, buffers.gate_up)
        mixed = self._kernels.elementwise.activate_mul(buffers.gate_up.tensor, self._activation)
        buffers.mixed.tensor.copy_(mixed)

    def _pick(
        self, hidden: Array, buffers: _Buffers, rows: Sequence[int]
    ) -> tuple[Array, _Buffers]:
        """Those rows of what the rest of a layer reads."""
        picked = self._buffers(len(rows))
        picked.attended.array[:] = buffers.attended.array[rows]
        return hidden[rows], picked

    def _product(
        self, module: nn.Module, x: Rows, y: Rows, epilogue: Epilogue | None = None
    ) -> None:
        """y = module(x), and then the epilogue."""
        linear: nn.Module = module
        adapters: Sequence[tuple[LoraWeights, LoraRows]] = ()
        if isinstance(module, LoraLinear):
            linear, adapters = module.current, module.adapters
        matrix = linear.matrix_for(len(x.array)) if isinstance(linear, PackedLinear) else None
        if matrix is not None and self._kernels.linear is not None:
            self._kernels.linear.linear_into(x.array, matrix, adapters, y.array, epilogue)
            return
        y.tensor.copy_(linear(x.tensor))
        for weights, rows in adapters:
            self._kernels.lora.add_lora_rows(y.array, x.array, weights, rows)
        if epilogue is not None:
            self._kernels.elementwise.run_epilogue(epilogue, y.array)

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

    def _places(
        self, rotary: Rotary, positions: Tensor, plan: JitAttentionPlan
    ) -> RotateWriteArrays:
        cos, sin = self._kernels.elementwise.rotation(
            positions, rotary.frequencies, rotary.signs, rotary.attention_factor
        )
        arrays = cos.numpy(), sin.numpy(), plan.slots.numpy(), self._storage.numpy()
        return RotateWriteArrays(*arrays)

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

    def _arrays(self, norm: RMSNorm | HeadNorm) -> NormArrays:
        return self._kernels.elementwise.norm_arrays(Norm(norm.weight, norm.eps))


def _weight(module: nn.Module) -> Tensor:
    base = module.base if isinstance(module, LoraLinear) else module
    assert isinstance(base.weight, Tensor)
    return base.weight
