"""Weights of a loaded base, as the adapters whose parts are computed from them read them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loramux.adapters.packed.extras import ATTENTION_NORM, FINAL_NORM, MLP_NORM
from loramux.kernels.linear import DenseWeight, LinearMethod, dense_of
from loramux.models.architectures import projections_of
from loramux.models.decoder import Decoder
from loramux.models.layers import RMSNorm
from loramux.types.model import LINEARS, FusedLinear


class DecoderWeights:
    """BaseWeights of a decoder whose linears have not been wrapped yet; any thread may read it.

    Rows are in the order of the checkpoint.
    """

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
            {name: getattr(layer, name) for name in LINEARS} for layer in decoder.layers
        ]
        self._row_maps = {
            projection.name: projection.row_map for projection in projections_of(decoder.config)
        }
        self._head: LinearMethod = decoder.lm_head
        self._columns: dict[str, tuple[str, slice]] = {}
        for linear in linears:
            start = 0
            for projection, width in zip(linear.projections, linear.out_features, strict=True):
                self._columns[projection] = linear.name, slice(start, start + width)
                start += width

    def weight(self, layer: int, projection: str) -> torch.Tensor:
        dense, columns = self._find(layer, projection)
        return self._in_file_order(dense.weight[columns], projection)

    def bias(self, layer: int, projection: str) -> torch.Tensor | None:
        dense, columns = self._find(layer, projection)
        if dense.bias is None:
            return None
        return self._in_file_order(dense.bias[columns], projection)

    def _in_file_order(self, rows: torch.Tensor, projection: str) -> torch.Tensor:
        row_map = self._row_maps.get(projection)
        return rows if row_map is None else rows[row_map.inverse().rows(len(rows))]

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
