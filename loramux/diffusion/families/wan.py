"""Wan as an image model: videos of one frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loramux.diffusion.families.base import (
    Family,
    Row,
    Sampling,
    Text,
    draw_noise,
    latents_of,
    stacked,
    timesteps_of,
    unsupported,
)
from loramux.diffusion.families.qwen_image import decode_frame
from loramux.types.image import ImageRequest


class Wan(Family):
    name = "wan"
    pipeline_class = "WanPipeline"
    has_graphs = True
    default_steps = 50
    default_guidance = 5.0

    def check_pipeline(self) -> None:
        if getattr(self.pipe, "transformer_2", None) is not None or self.pipe.transformer is None:
            raise unsupported(self.pipe, "it has two denoisers (Wan 2.2), and one is served")
        if self.pipe.config.expand_timesteps:
            raise unsupported(self.pipe, "it has a timestep for each token")

    @property
    def size_factor(self) -> int:
        patch = self.pipe.transformer.config.patch_size[1]
        return int(self.pipe.vae_scale_factor_spatial) * int(patch)

    @property
    def own_size(self) -> int:
        return 480

    def encode(self, text: str, length: int) -> Text:
        embeds, _ = self.pipe.encode_prompt(
            text,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return {"embeds": embeds.to(self.dtype)}

    def start(self, request: ImageRequest, scheduler: Any, generator: torch.Generator) -> Sampling:
        scheduler.set_timesteps(request.steps, device=self.device)
        scheduler.set_begin_index(0)
        factor = int(self.pipe.vae_scale_factor_spatial)
        channels = self.pipe.transformer.config.in_channels
        shape = (1, channels, 1, request.height // factor, request.width // factor)
        return Sampling(
            request=request,
            scheduler=scheduler,
            generator=generator,
            latents=draw_noise(shape, generator, torch.float32, self.device),
            timesteps=scheduler.timesteps,
        )

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        out = self.pipe.transformer(
            hidden_states=latents_of(rows).to(self.dtype),
            timestep=timesteps_of(rows),
            encoder_hidden_states=stacked(rows, "embeds"),
            return_dict=False,
        )[0]
        return list(out.split(1))

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        return decode_frame(self.pipe.vae, latents)
