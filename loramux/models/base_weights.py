"""Weights of a loaded base, as the adapters whose parts are computed from them read them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loramux.adapters.packed.extras import ATTENTION_NORM, FINAL_NORM, MLP_NORM
from loramux.kernels.linear import LinearMethod
from loramux.models.architectures import linears_of
from loramux.models.decoder import Decoder
from loramux.models.layers import RMSNorm
from loramux.types.model import Projection


class DecoderWeights:
    """BaseWeights of a decoder whose linears have not been wrapped yet; any thread may read it.

    Rows are in the order of the checkpoint.
    """

    def __init__(self, decoder: Decoder, wait_until_read: Callable[[], object]) -> None:
        """`wait_until_read` returns when the decoder holds its weights."""
        self._decoder = decoder
        self._wait = wait_until_read
        self._head: LinearMethod = decoder.lm_head
        self._members = {
            projection.name: (spec.name, projection)
            for spec in linears_of(decoder.config)
            for projection in spec.members
        }
        names = dict.fromkeys(name for name, _ in self._members.values())
        self._linears: list[dict[str, LinearMethod]] = [
            {name: getattr(layer, name) for name in names} for layer in decoder.layers
        ]

    def weight(self, layer: int, projection: str) -> torch.Tensor:
        linear, found = self._find(layer, projection)
        return _in_file_order(linear.dequantised_rows(found.rows), found)

    def bias(self, layer: int, projection: str) -> torch.Tensor | None:
        linear, found = self._find(layer, projection)
        return None if linear.bias is None else _in_file_order(linear.bias[found.rows], found)

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
        return self._head.dequantised_rows()

    def _find(self, layer: int, projection: str) -> tuple[LinearMethod, Projection]:
        self._wait()
        name, found = self._members[projection]
        return self._linears[layer][name], found


def _in_file_order(rows: torch.Tensor, projection: Projection) -> torch.Tensor:
    row_map = projection.row_map
    return rows if row_map is None else rows[row_map.inverse().rows(len(rows))]
