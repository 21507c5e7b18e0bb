"""Weights of a loaded base, as the adapters whose parts are computed from them read them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loramux.adapters.packed.extras import ATTENTION_NORM, FINAL_NORM, MLP_NORM
from loramux.kernels.linear import DenseWeight, LinearMethod, dense_of
from loramux.models.decoder import Decoder
from loramux.models.layers import RMSNorm
from loramux.types.model import FUSED_LINEARS, FusedLinear


class DecoderWeights:
    """BaseWeights of a decoder whose linears have not been wrapped yet; any thread may read it."""

    def __init__(
        self,
        decoder: Decoder,
        linears: tuple[FusedLinear, ...],
        wait_until_read: Callable[[], object],
    ) -> None:
        """`wait_until_read` returns when the decoder holds its weights."""
        self._decoder = decoder
        self._wait = wait_until_read
        self._fused: list[dict[str, LinearMethod]] = [
            {name: getattr(layer, name) for name in FUSED_LINEARS} for layer in decoder.layers
        ]
        self._head: LinearMethod = decoder.lm_head
        self._columns: dict[str, tuple[str, slice]] = {}
        for linear in linears:
            start = 0
            for projection, width in zip(linear.projections, linear.out_features, strict=True):
                self._columns[projection] = linear.name, slice(start, start + width)
                start += width

    def weight(self, layer: int, projection: str) -> torch.Tensor:
        dense, columns = self._find(layer, projection)
        return dense.weight[columns]

    def bias(self, layer: int, projection: str) -> torch.Tensor | None:
        dense, columns = self._find(layer, projection)
        return None if dense.bias is None else dense.bias[columns]

    def norm(self, layer: int, name: str) -> torch.Tensor:
        self._wait()
        if name == FINAL_NORM:
            return self._decoder.norm.weight
        assert name in (ATTENTION_NORM, MLP_NORM), name
        norm = getattr(self._decoder.layers[layer], name)
        assert isinstance(norm, RMSNorm)
        return norm.weight

    @property
    def embedding(self) -> torch.Tensor:
        self._wait()
        return self._decoder.embed_tokens.weight

    @property
    def head(self) -> torch.Tensor:
        self._wait()
        return dense_of(self._head).weight

    def _find(self, layer: int, projection: str) -> tuple[DenseWeight, slice]:
        self._wait()
        name, columns = self._columns[projection]
        return dense_of(self._fused[layer][name]), columns
