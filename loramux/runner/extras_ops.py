"""Op set of the decoder with DoRA magnitudes, biases and saved modules of a step's adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from torch import Tensor

from loramux.adapters.packed.extras import ATTENTION_NORM, FINAL_NORM, MLP_NORM, MODEL_LEVEL
from loramux.kernels.linear import LinearMethod
from loramux.kernels.ops import Rows
from loramux.lora.attach import LoraLinear
from loramux.lora.extras import StepExtras
from loramux.models.architectures import linears_of
from loramux.models.decoder import Decoder
from loramux.models.forward import Attention, DecoderOps, ExpertOps, MixtureOfExperts
from loramux.types.model import ATTENTION_BLOCK

X = TypeVar("X", bound=Tensor | Rows)
N = TypeVar("N")


class OpsWithExtras(Generic[X, N]):
    """DecoderOps that change embeddings and norms as well; linears do it themselves."""

    def __init__(
        self,
        ops: DecoderOps[X, LinearMethod, N],
        extras: StepExtras,
        decoder: Decoder,
        selected: Sequence[int] | None = None,
    ) -> None:
        """Take the rows that `select` of these ops keeps as `selected`; None: all."""
        self._ops = ops
        self._extras = extras
        self._selected = selected
        self._num_layers = len(decoder.layers)
        self._embed_scale = decoder.embed_tokens.scale
        self._mixer_outputs = {
            spec.name
            for spec in linears_of(decoder.config)
            if spec.is_added and spec.block == ATTENTION_BLOCK
        }

    def embed(self, token_ids: Tensor, positions: Tensor) -> X:
        embedded = self._ops.embed(self._extras.base_tokens(token_ids), positions)
        self._extras.change_embedding(_tensor(embedded), token_ids, self._embed_scale)
        return embedded

    def norm(self, residual: X, norm: N | None) -> X:
        normed = self._ops.norm(residual, norm)
        if norm is None:
            return normed
        self._extras.change_norm(0, ATTENTION_NORM, _tensor(normed))
        return normed

    def linear_rotate_write(self, attention: Attention[LinearMethod, N], x: X) -> X:
        return self._ops.linear_rotate_write(attention, x)

    def attend(self, attention: Attention[LinearMethod, N], q: X) -> X:
        return self._ops.attend(attention, q)

    def select(self, attended: X, residual: X) -> tuple[X, X]:
        if self._selected is not None:
            self._extras.keep_rows(self._selected)
        return self._ops.select(attended, residual)

    def linear_add_norm(
        self, linear: LinearMethod, x: X, residual: X, norm: N | None, after: N | None
    ) -> X:
        normed = self._ops.linear_add_norm(linear, x, residual, norm, after)
        if norm is None:
            return normed
        self._extras.change_norm(*self._norm_after(linear), _tensor(normed))
        return normed

    def experts_add_norm(
        self,
        mlp: MixtureOfExperts[LinearMethod],
        x: X,
        residual: X,
        norm: N | None,
        after: N | None,
    ) -> X:
        ops = cast("ExpertOps[X, LinearMethod, N]", self._ops)
        normed = ops.experts_add_norm(mlp, x, residual, norm, after)
        if norm is not None:
            self._extras.change_norm(*self._norm_after(mlp.router), _tensor(normed))
        return normed

    def linear_glu(self, linear: LinearMethod, x: X) -> X:
        return self._ops.linear_glu(linear, x)

    def _norm_after(self, linear: LinearMethod) -> tuple[int, str]:
        """Return the layer and name of the norm that follows a linear."""
        assert isinstance(linear, LoraLinear), "linears are wrapped"
        layer, name = linear.site
        if name in self._mixer_outputs:
            return layer, MLP_NORM
        is_last = layer + 1 == self._num_layers
        return (MODEL_LEVEL, FINAL_NORM) if is_last else (layer + 1, ATTENTION_NORM)


def _tensor(x: Tensor | Rows) -> Tensor:
    return x.tensor if isinstance(x, Rows) else x
