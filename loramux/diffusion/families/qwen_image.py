"""Qwen-Image: prompts of different lengths share a forward, padded with a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.diffusion.families.base import (
    FlowFamily,
    Row,
    Sampling,
    Text,
    latents_of,
    sample_latents,
    sampling_of,
    timesteps_of,
    unsupported,
)
from loramux.types.image import ImageRequest


class QwenImage(FlowFamily):
    name = "qwen-image"
    pipeline_class = "QwenImagePipeline"
    has_graphs = True
    default_steps = 50
    default_guidance = 1.0
    guidance_name = "true_cfg_scale"
    takes_guidance = False
    needs_equal_text = False
    takes_image = True

    def check_pipeline(self) -> None:
        if self.pipe.transformer.config.guidance_embeds:
            raise unsupported(self.pipe, "its transformer takes the guidance as an embedding")

    def cfg_scale(self, request: ImageRequest) -> float:
        return 4.0 if request.true_cfg_scale is None else request.true_cfg_scale

    def is_guided(self, request: ImageRequest) -> bool:
        return self.cfg_scale(request) > 1 and bool(request.negative_prompt)

    def encode(self, text: str, length: int) -> Text:
        embeds, _ = self.pipe.encode_prompt(text, device=self.device, max_sequence_length=length)
        return {"embeds": embeds}

    def start(self, request: ImageRequest, scheduler: Any, generator: torch.Generator) -> Sampling:
        channels = self.pipe.transformer.config.in_channels // 4
        high, wide = (2 * (side // self.size_factor) for side in (request.height, request.width))
        self.set_timesteps(scheduler, request.steps, (high // 2) * (wide // 2))
        beginning = self.begin(request, scheduler, generator, (1, 1, channels, high, wide))
        return sampling_of(request, scheduler, generator, beginning)

    def encode_image(self, image: Tensor, generator: torch.Generator) -> Tensor:
        vae = self.pipe.vae
        latents = sample_latents(vae, image.to(vae.dtype)[:, :, None], generator)
        mean, std = frame_statistics(vae, latents)
        return ((latents - mean) / std).transpose(1, 2)

    def pack(self, latents: Tensor) -> Tensor:
        packed: Tensor = self.pipe._pack_latents(latents, 1, *latents.shape[2:])
        return packed

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        embeds, mask = padded([row.text["embeds"] for row in rows])
        request = rows[0].sampling.request
        shape = (1, request.height // self.size_factor, request.width // self.size_factor)
        latents = latents_of(rows).to(self.dtype)
        out = self.pipe.transformer(
            hidden_states=latents,
            timestep=timesteps_of(rows).to(latents.dtype) / 1000,
            guidance=None,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[shape]] * len(rows),
            return_dict=False,
        )[0]
        return list(out.split(1))

    def guide(self, request: ImageRequest, positive: Tensor, negative: Tensor) -> Tensor:
        """Rescales the combination to the norm of the positive prediction."""
        combined = negative + self.cfg_scale(request) * (positive - negative)
        wanted = torch.linalg.vector_norm(positive, dim=-1, keepdim=True)
        rescaled: Tensor = combined * (
            wanted / torch.linalg.vector_norm(combined, dim=-1, keepdim=True)
        )
        return rescaled

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        latents = self.pipe._unpack_latents(latents, *size, self.pipe.vae_scale_factor)
        return decode_frame(self.pipe.vae, latents)


def padded(embeds: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Pad [1, tokens, width] to the longest; the mask is None if all are equally long."""
    lengths = [value.shape[1] for value in embeds]
    longest = max(lengths)
    rows = torch.cat([F.pad(value, (0, 0, 0, longest - value.shape[1])) for value in embeds])
    if min(lengths) == longest:
        return rows, None
    positions = torch.arange(longest, device=rows.device)
    return rows, (positions < torch.tensor(lengths, device=rows.device)[:, None]).long()


def decode_frame(vae: Any, latents: Tensor) -> Tensor:
    """Decode the first frame with a video VAE."""
    latents = latents.to(vae.dtype)
    mean, std = frame_statistics(vae, latents)
    image: Tensor = vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0]
    return image


def frame_statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the channels of a video VAE's latents."""
    mean, std = (
        torch.tensor(values).view(1, vae.config.z_dim, 1, 1, 1).to(like)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
