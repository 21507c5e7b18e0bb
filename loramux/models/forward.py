"""The forward pass of a decoder, written once and run by several op sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor

from loramux.kernels.ops import AttendArgs

X = TypeVar("X")
L = TypeVar("L")
N = TypeVar("N")


class Attention(NamedTuple, Generic[L, N]):
    """A mixer: attention over the sequence's own tokens."""

    qkv: L
    o: L
    head_norm: N | None
    """Norm of each query and key head before its rotation."""
    wide_norms: tuple[N, N] | None
    """Norms of all queries and of all keys of a token, before their rotation."""
    args: AttendArgs
    rope: int
    """Index of the layer's rotary embedding among those of the model."""


class GatedMlp(NamedTuple, Generic[L]):
    """An MLP: down(activation(gate) * up), with gate and up as one linear."""

    gate_up: L
    down: L


class MixtureOfExperts(NamedTuple, Generic[L]):
    """An MLP: the sum of the experts that the router chooses for a token, times their scores."""

    router: L
    experts: tuple[GatedMlp[L], ...]
    num_chosen: int
    normalises: bool
    """The scores of the chosen experts are divided by their sum."""


class Layer(NamedTuple, Generic[L, N]):
    """One decoder layer: linears of type L and norms of type N, as an op set reads them.

    A mixer exchanges information between the tokens of a sequence, an MLP reads each token alone;
    further kinds of either are alternatives of these two fields.
    """

    mixer: Attention[L, N]
    mlp: GatedMlp[L] | MixtureOfExperts[L]
    mixer_norm: N | None
    mlp_norm: N | None
    after_mixer_norm: N | None
    """Norm of the mixer's output before it is added to the residual."""
    after_mlp_norm: N | None
    next_norm: N | None
    """Mixer norm of the following layer, or the final norm."""


class DecoderOps(Protocol[X, L, N]):
    """The ops of one step on activations of type X; made by the runner for each step."""

    def embed(self, token_ids: Tensor, positions: Tensor) -> X:
        """Begin the step: compute its rotary angles and return the residual stream.

        token_ids, positions [tokens]
        """
        ...

    def norm(self, residual: X, norm: N | None) -> X:
        """Return norm(residual); the residual itself without a norm."""
        ...

    def linear_rotate_write(self, attention: Attention[L, N], x: X) -> X:
        """Compute q, k and v, norm and rotate q and k, store k and v in pages; return q."""
        ...

    def attend(self, attention: Attention[L, N], q: X) -> X:
        """Attention of each token over its own sequence up to itself."""
        ...

    def select(self, attended: X, residual: X) -> tuple[X, X]:
        """Keep the tokens whose hidden state is asked for; called in the last layer alone."""
        ...

    def linear_add_norm(self, linear: L, x: X, residual: X, norm: N | None, after: N | None) -> X:
        """residual += after(linear(x)), in place; return norm(residual), or the residual."""
        ...

    def linear_glu(self, linear: L, x: X) -> X:
        """Gated linear unit: activation(gate) * up, where linear(x) is gate and up."""
        ...


class ExpertOps(DecoderOps[X, L, N], Protocol[X, L, N]):
    """The ops of models with mixtures of experts."""

    def experts_add_norm(
        self,
        mlp: MixtureOfExperts[L],
        x: X,
        residual: X,
        norm: N | None,
        after: N | None,
    ) -> X:
        """residual += after(experts(x)), in place; return norm(residual), or the residual."""
        ...


def hidden_states(
    layers: Sequence[Layer[L, N]],
    ops: DecoderOps[X, L, N],
    token_ids: Tensor,
    positions: Tensor,
) -> X:
    """Compute the normed hidden states of the tokens that `ops.select` keeps."""
    residual = ops.embed(token_ids, positions)
    x = ops.norm(residual, layers[0].mixer_norm)
    for layer in layers:
        attention, mlp = layer.mixer, layer.mlp
        q = ops.linear_rotate_write(attention, x)
        x = ops.attend(attention, q)
        if layer is layers[-1]:
            x, residual = ops.select(x, residual)
        x = ops.linear_add_norm(attention.o, x, residual, layer.mlp_norm, layer.after_mixer_norm)
        norms = layer.next_norm, layer.after_mlp_norm
        if isinstance(mlp, MixtureOfExperts):
            x = cast("ExpertOps[X, L, N]", ops).experts_add_norm(mlp, x, residual, *norms)
        else:
            x = ops.linear_glu(mlp.gate_up, x)
            x = ops.linear_add_norm(mlp.down, x, residual, *norms)
    return x
