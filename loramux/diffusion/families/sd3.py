"""Stable Diffusion 3: a transformer on latents, with two rows per guided image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loramux.diffusion.families.base import (
    FlowFamily,
    Row,
    Sampling,
    Text,
    latents_of,
    sampling_of,
    stacked,
    timesteps_of,
)
from loramux.types.image import ImageRequest


class StableDiffusion3(FlowFamily):
    name = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"
    has_graphs = True
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    default_guidance = 7.0
    default_length = 256
    length_tokenizer = "tokenizer_3"
    takes_image = True

    @property
    def size_factor(self) -> int:
        return int(self.pipe.vae_scale_factor) * int(self.pipe.patch_size)

    def encode(self, text: str, length: int) -> Text:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            text,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return {"embeds": embeds, "pooled": pooled}

    def start(self, request: ImageRequest, scheduler: Any, generator: torch.Generator) -> Sampling:
        factor = int(self.pipe.vae_scale_factor)
        high, wide = request.height // factor, request.width // factor
        channels = self.pipe.transformer.config.in_channels
        options = {}
        if scheduler.config.get("use_dynamic_shifting"):
            patch = self.pipe.transformer.config.patch_size
            options["mu"] = self.shift(scheduler.config, (high // patch) * (wide // patch))
        scheduler.set_timesteps(request.steps, device=self.device, **options)
        beginning = self.begin(request, scheduler, generator, (1, channels, high, wide))
        return sampling_of(request, scheduler, generator, beginning)

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        out = self.pipe.transformer(
            hidden_states=latents_of(rows).to(self.dtype),
            timestep=timesteps_of(rows),
            encoder_hidden_states=stacked(rows, "embeds"),
            pooled_projections=stacked(rows, "pooled"),
            return_dict=False,
        )[0]
        return list(out.split(1))

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        vae = self.pipe.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        image: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return image
