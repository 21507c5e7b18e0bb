"""The weights of a decoder, and its forward pass in torch over the tokens of many sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.kernels.linear import DENSE, LinearMethod, at_rows
from loramux.kernels.ops import AttendArgs
from loramux.models.architectures import (
    ROUTER,
    DecoderConfig,
    ExpertsConfig,
    expert_linear,
    head_linear,
    linears_of,
)
from loramux.models.families import HeadNormScope
from loramux.models.forward import (
    Attention,
    DecoderOps,
    GatedMlp,
    Layer,
    MixtureOfExperts,
    hidden_states,
)
from loramux.models.layers import HeadNorm, Linear, RMSNorm, Rotary, WideNorm, rotate_
from loramux.models.linear_method import Quantisation, linear_method
from loramux.types.model import TEXT_PREFIX, LinearSpec

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

L = TypeVar("L")
N = TypeVar("N")
N_co = TypeVar("N_co", covariant=True)
TorchNorm = Callable[[Tensor], Tensor]
TorchDecoderOps = DecoderOps[Tensor, LinearMethod, TorchNorm]


class MakeNorm(Protocol[N_co]):
    """Turns a norm module into what an op set reads."""

    def __call__(self, norm: RMSNorm | HeadNorm) -> N_co: ...


class AttentionContext(Protocol):
    """The KV cache of a step's sequences; the runner makes one per step."""

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the step's keys and values; k, v [tokens, kv_heads, head_dim] are views."""
        ...

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        """Attend from each token to its own sequence up to itself.

        q [tokens, heads, head_dim] -> [tokens, heads * head_dim]
        """
        ...


class DecoderLayer(nn.Module):
    """The weights of a layer; its linears are attributes by the names of their specs."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quantisation: Quantisation | None = None,
    ) -> None:
        super().__init__()
        hidden, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
        norm_dtype = torch.float32 if config.norm_plus_one else dtype
        names = config.norm_names

        def norm(name: str | None) -> RMSNorm | None:
            if name is None:
                return None
            return RMSNorm(hidden, eps=config.rms_norm_eps, dtype=norm_dtype, device=device)

        self.attention = AttendArgs(
            layer=layer,
            scale=config.query_scale,
            sliding_window=config.sliding_windows[layer],
            softcap=config.attn_logit_softcap,
        )
        self.specs = linears_of(config)
        self.experts = config.experts
        for spec in self.specs:
            path = f"{TEXT_PREFIX}layers.{layer}.{spec.block}"
            method = linear_method(spec, quantisation, path=path, dtype=dtype, device=device)
            setattr(self, spec.name, method)
        self.rope = config.layer_ropes[layer]
        self.attention_norm = norm(names.attention)
        self.mlp_norm = norm(names.mlp)
        self.after_attention_norm = norm(names.after_attention)
        self.after_mlp_norm = norm(names.after_mlp)
        self.head_norm = (
            HeadNorm(
                config.num_heads + config.num_kv_heads,
                config.head_dim,
                eps=config.rms_norm_eps,
                dtype=norm_dtype,
                device=device,
            )
            if config.qk_norm is HeadNormScope.HEAD
            else None
        )
        self.wide_norm = (
            WideNorm((q_size, kv_size), eps=config.rms_norm_eps, dtype=norm_dtype, device=device)
            if config.has_wide_norm
            else None
        )

    def linear(self, name: str) -> LinearMethod:
        """Return the linear of the spec of this name, which another LinearMethod may
        have replaced.
        """
        return cast(LinearMethod, getattr(self, name))

    def describe(
        self,
        next_norm: N | None,
        *,
        linear: Callable[[LinearSpec, LinearMethod], L],
        norm: MakeNorm[N],
    ) -> Layer[L, N]:
        """Return the layer for an op set, which makes its own linears and norms."""

        def made(module: RMSNorm | HeadNorm | None) -> N | None:
            return None if module is None else norm(module)

        linears = {spec.name: linear(spec, self.linear(spec.name)) for spec in self.specs}
        wide = self.wide_norm
        return Layer(
            mixer=Attention(
                qkv=linears["qkv"],
                o=linears["o"],
                head_norm=made(self.head_norm),
                wide_norms=None if wide is None else (norm(wide.query), norm(wide.key)),
                args=self.attention,
                rope=self.rope,
            ),
            mlp=_describe_mlp(self.experts, linears),
            mixer_norm=made(self.attention_norm),
            mlp_norm=made(self.mlp_norm),
            after_mixer_norm=made(self.after_attention_norm),
            after_mlp_norm=made(self.after_mlp_norm),
            next_norm=next_norm,
        )


def _describe_mlp(
    experts: ExpertsConfig | None, linears: Mapping[str, L]
) -> GatedMlp[L] | MixtureOfExperts[L]:
    if experts is None:
        return GatedMlp(linears["gate_up"], linears["down"])
    members = tuple(
        GatedMlp(linears[expert_linear(number, "gate_up")], linears[expert_linear(number, "down")])
        for number in range(experts.count)
    )
    return MixtureOfExperts(linears[ROUTER], members, experts.num_chosen, experts.normalises)


class Decoder(nn.Module):
    """The weights of any supported model, described by its DecoderConfig."""

    embed_tokens: Embedding
    lm_head: LinearMethod

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quantisation: Quantisation | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        embedding = Embedding(config, dtype=dtype, device=device)
        self.embed_tokens = embedding
        self.lm_head = (
            Linear.over(embedding.weight, None)
            if config.tie_embeddings
            else linear_method(head_linear(config), quantisation, dtype=dtype, device=device)
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device, quantisation=quantisation)
            for layer in range(config.num_layers)
        )
        norm_dtype = torch.float32 if config.norm_plus_one else dtype
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=norm_dtype, device=device
        )
        self.rotaries = nn.ModuleList(
            Rotary(rope, config.head_dim, device=device) for rope in config.ropes
        )
        # Read now: an executor may wrap the linears.
        formats = {linear.gemm_key for _, linear in self.linears()} - {DENSE}
        self.kept_formats: tuple[str, ...] = tuple(sorted(formats))
        """Formats other than floating point in which weights of layers are kept."""

    def linears(self) -> Iterator[tuple[LinearSpec, LinearMethod]]:
        """Yield the linears of all layers, layer by layer."""
        for layer in cast("list[DecoderLayer]", list(self.layers)):
            for spec in layer.specs:
                yield spec, layer.linear(spec.name)

    def describe(
        self,
        *,
        linear: Callable[[int, LinearSpec, LinearMethod], L],
        norm: MakeNorm[N],
    ) -> list[Layer[L, N]]:
        """Return the layers for an op set; `linear` is called with (layer, spec, method)."""
        layers = cast("list[DecoderLayer]", list(self.layers))
        following = [*(layer.attention_norm for layer in layers[1:]), self.norm]
        next_norms = [None if module is None else norm(module) for module in following]
        return [
            layer.describe(next_norm, linear=partial(linear, index), norm=norm)
            for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True))
        ]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        wrap: Callable[[TorchDecoderOps], TorchDecoderOps] | None = None,
    ) -> Tensor:
        """Compute the normed hidden state of every token with torch ops: [tokens, hidden].

        token_ids, positions [tokens]: the tokens of all sequences of the step, concatenated.
        `wrap` may add to what the ops compute.
        """
        layers = self.describe(linear=_keep_linear, norm=_keep_norm)
        ops: TorchDecoderOps = TorchOps(self, attention)
        return hidden_states(layers, ops if wrap is None else wrap(ops), token_ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [tokens, vocab] in float32 from hidden [tokens, hidden]."""
        return self.cap_logits(self.uncapped_logits(self.scaled(hidden)))

    def uncapped_logits(self, scaled: Tensor) -> Tensor:
        return self.lm_head(scaled).float()

    def scaled(self, hidden: Tensor) -> Tensor:
        """Return the input of the output head."""
        scale = self.config.logit_scale
        return hidden if scale == 1.0 else hidden * scale

    def cap_logits(self, logits: Tensor) -> Tensor:
        """Apply the model's softcap, if it has one, in place."""
        cap = self.config.final_logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class TorchOps:
    """DecoderOps in torch over the decoder's own modules: the reference, on any device."""

    def __init__(self, decoder: Decoder, attention: AttentionContext) -> None:
        config = decoder.config
        self._decoder = decoder
        self._attention = attention
        self._num_heads = config.num_heads
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim
        self._activation = ACTIVATION_FUNCTIONS[config.activation]
        self._rotations: list[tuple[Tensor, Tensor]] = []

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        decoder = self._decoder
        residual: Tensor = decoder.embed_tokens(token_ids)
        self._rotations = [rotary(positions, residual.dtype) for rotary in decoder.rotaries]
        return residual

    def norm(self, residual: Tensor, norm: TorchNorm | None) -> Tensor:
        return residual if norm is None else norm(residual)

    def linear_rotate_write(
        self, attention: Attention[LinearMethod, TorchNorm], x: Tensor
    ) -> Tensor:
        heads = attention.qkv(x).view(x.shape[0], -1, self._head_dim)
        qk = heads[:, : self._num_rotated]
        if attention.head_norm is not None:
            qk = attention.head_norm(qk)
        elif attention.wide_norms is not None:
            parts = qk[:, : self._num_heads], qk[:, self._num_heads :]
            normed = [
                norm(part.flatten(1)).view_as(part)
                for part, norm in zip(parts, attention.wide_norms, strict=True)
            ]
            qk = torch.cat(normed, 1)
        qk = rotate_(qk, *self._rotations[attention.rope])
        k, v = qk[:, self._num_heads :], heads[:, self._num_rotated :]
        self._attention.write_kv(attention.args.layer, k, v)
        return qk[:, : self._num_heads]

    def attend(self, attention: Attention[LinearMethod, TorchNorm], q: Tensor) -> Tensor:
        return self._attention.attend(q, attention.args)

    def select(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return attended, residual

    def linear_add_norm(
        self,
        linear: LinearMethod,
        x: Tensor,
        residual: Tensor,
        norm: TorchNorm | None,
        after: TorchNorm | None,
    ) -> Tensor:
        y = linear(x)
        residual.add_(y if after is None else after(y))
        return self.norm(residual, norm)

    def linear_glu(self, linear: LinearMethod, x: Tensor) -> Tensor:
        return self._glu(linear(x))

    def experts_add_norm(
        self,
        mlp: MixtureOfExperts[LinearMethod],
        x: Tensor,
        residual: Tensor,
        norm: TorchNorm | None,
        after: TorchNorm | None,
    ) -> Tensor:
        scores = mlp.router(x).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(mlp.num_chosen, dim=-1)
        if mlp.normalises:
            weights /= weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        y = torch.zeros_like(x)
        for number in sorted(set(chosen.flatten().tolist())):
            expert = mlp.experts[number]
            rows, places = (chosen == number).nonzero(as_tuple=True)
            hidden = self._glu(at_rows(expert.gate_up, rows)(x[rows]))
            added = at_rows(expert.down, rows)(hidden)
            y.index_add_(0, rows, added * weights[rows, places, None])
        residual.add_(y if after is None else after(y))
        return self.norm(residual, norm)

    def _glu(self, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        return self._activation(gate).mul_(up)


class Embedding(nn.Module):
    """Token embeddings, multiplied by the model's scale."""

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device),
            requires_grad=False,
        )
        self.scale = config.embed_scale
        if config.rounds_embed_scale:
            self.scale = float(torch.tensor(self.scale, dtype=dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = F.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


def _keep_linear(layer: int, spec: LinearSpec, linear: LinearMethod) -> LinearMethod:
    return linear


def _keep_norm(norm: RMSNorm | HeadNorm) -> TorchNorm:
    return norm
