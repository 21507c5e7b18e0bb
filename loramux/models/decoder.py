"""The one decoder that computes every supported model, over rows of many sequences at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.models.architectures import DecoderConfig
from loramux.models.layers import HeadNorm, Linear, RMSNorm, Rotary, rotate_

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class AttentionContext(Protocol):
    """Where the keys and values of a step's sequences are. The runner makes one per step."""

    def attend(  # noqa: PLR0913
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store k and v, then let each row see its own sequence up to itself.

        q [tokens, heads, head_dim]   k, v [tokens, kv_heads, head_dim]
        returns [tokens, heads * head_dim]

        The three are views with gaps between their rows, and die with the call: copy what is kept.
        """
        ...


class DecoderLayer(nn.Module):
    """`qkv`, `o`, `gate_up` and `down` may each be replaced by a module of the same shapes."""

    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.q_size, config.kv_size
        norm_dtype = torch.float32 if config.norm_plus_one else dtype

        def linear(in_features: int, out_features: int, bias: bool) -> Linear:
            return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)

        def norm() -> RMSNorm:
            return RMSNorm(hidden, eps=config.rms_norm_eps, dtype=norm_dtype, device=device)

        self.layer = layer
        self.num_heads = config.num_heads
        self.num_rotated = config.num_heads + config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.query_scale
        self.sliding_window = config.sliding_windows[layer]
        self.softcap = config.attn_logit_softcap
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.qkv = linear(hidden, q_size + 2 * kv_size, config.qkv_bias)
        self.o = linear(q_size, hidden, config.o_bias)
        self.gate_up = linear(hidden, 2 * inner, config.mlp_bias)
        self.down = linear(inner, hidden, config.mlp_bias)
        self.attention_norm = norm()
        self.mlp_norm = norm()
        self.after_attention_norm = norm() if config.sandwich_norms else None
        self.after_mlp_norm = norm() if config.sandwich_norms else None
        self.head_norm = (
            HeadNorm(
                self.num_rotated,
                config.head_dim,
                eps=config.rms_norm_eps,
                dtype=norm_dtype,
                device=device,
            )
            if config.qk_norm
            else None
        )

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionContext
    ) -> Tensor:
        """Adds this layer to `hidden`, in place."""
        attended = self.attend(self.attention_norm(hidden), rotation, attention)
        if self.after_attention_norm is not None:
            attended = self.after_attention_norm(attended)
        hidden.add_(attended)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        mixed = self.down(self.activation(gate).mul_(up))
        if self.after_mlp_norm is not None:
            mixed = self.after_mlp_norm(mixed)
        return hidden.add_(mixed)

    def attend(
        self, normed: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionContext
    ) -> Tensor:
        qkv = self.qkv(normed).view(normed.shape[0], -1, self.head_dim)
        qk = qkv[:, : self.num_rotated]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = rotate_(qk, *rotation)
        attended = attention.attend(
            self.layer,
            qk[:, : self.num_heads],
            qk[:, self.num_heads :],
            qkv[:, self.num_rotated :],
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
        )
        return cast(Tensor, self.o(attended))


class Decoder(nn.Module):
    embed_tokens: nn.Module
    lm_head: nn.Module

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        embedding = Embedding(config, dtype=dtype, device=device)
        head_device = "meta" if config.tie_embeddings else device
        head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=head_device)
        if config.tie_embeddings:
            head.weight = embedding.weight
        self.embed_tokens = embedding
        self.lm_head = head
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device)
            for layer in range(config.num_layers)
        )
        norm_dtype = torch.float32 if config.norm_plus_one else dtype
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=norm_dtype, device=device
        )
        self.rotary = Rotary(config.rope, config.head_dim, device=device)
        self.rotary_local = (
            Rotary(config.rope_local, config.head_dim, device=device) if config.rope_local else None
        )

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """The normed hidden state of every row: [tokens, hidden].

        token_ids, positions [tokens]: the rows of all sequences of the step, one after another
        """
        hidden = self.embed_tokens(token_ids)
        rotation = self.rotary(positions, hidden.dtype)
        local = self.rotary_local(positions, hidden.dtype) if self.rotary_local else rotation
        for layer in self.layers:
            hidden = layer(hidden, rotation if layer.sliding_window is None else local, attention)
        return cast(Tensor, self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab], float32"""
        logits = cast(Tensor, self.lm_head(hidden)).float()
        cap = self.config.final_logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class Embedding(nn.Module):
    """Rows of `weight`, times the model's scale."""

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device),
            requires_grad=False,
        )
        # Checkpoints are trained with the scale rounded to the weights' precision.
        self.scale = float(torch.tensor(config.embed_scale, dtype=dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = F.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)
