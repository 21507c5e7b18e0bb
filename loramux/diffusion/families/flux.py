"""FLUX.1: guidance is an input of the model; a negative prompt adds a second row."""

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
    unsupported,
)
from loramux.types.image import ImageRequest


class Flux(FlowFamily):
    name = "flux"
    pipeline_class = "FluxPipeline"
    has_graphs = True
    text_encoders = ("text_encoder", "text_encoder_2")
    guidance_name = "true_cfg_scale"
    length_tokenizer = "tokenizer_2"
    takes_image = True

    def check_pipeline(self) -> None:
        channels = self.pipe.transformer.config.in_channels
        if channels != 4 * self.pipe.vae.config.latent_channels:
            raise unsupported(
                self.pipe,
                f"its transformer has {channels} input channels: models that take a mask or "
                "another image beside the latents are not served",
            )

    def is_guided(self, request: ImageRequest) -> bool:
        return (request.true_cfg_scale or 1.0) > 1 and bool(request.negative_prompt)

    def encode(self, text: str, length: int) -> Text:
        embeds, pooled, ids = self.pipe.encode_prompt(
            text, prompt_2=None, device=self.device, max_sequence_length=length
        )
        return {"embeds": embeds, "pooled": pooled, "ids": ids}

    def start(self, request: ImageRequest, scheduler: Any, generator: torch.Generator) -> Sampling:
        channels = self.pipe.transformer.config.in_channels // 4
        high, wide = (2 * (side // self.size_factor) for side in (request.height, request.width))
        self.set_timesteps(scheduler, request.steps, (high // 2) * (wide // 2))
        beginning = self.begin(request, scheduler, generator, (1, channels, high, wide))
        ids = self.pipe._prepare_latent_image_ids(1, high // 2, wide // 2, self.device, self.dtype)
        return sampling_of(request, scheduler, generator, beginning, ids=ids)

    def pack(self, latents: Tensor) -> Tensor:
        packed: Tensor = self.pipe._pack_latents(latents, *latents.shape)
        return packed

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        guidance = None
        if self.pipe.transformer.config.guidance_embeds:
            scales = [self.guidance(row.sampling.request) for row in rows]
            guidance = torch.tensor(scales, dtype=torch.float32, device=self.device)
        latents = latents_of(rows).to(self.dtype)
        out = self.pipe.transformer(
            hidden_states=latents,
            timestep=timesteps_of(rows).to(latents.dtype) / 1000,
            guidance=guidance,
            pooled_projections=stacked(rows, "pooled"),
            encoder_hidden_states=stacked(rows, "embeds"),
            # All rows have the same size and text length, and share the positions.
            txt_ids=rows[0].text["ids"],
            img_ids=rows[0].sampling.extra["ids"],
            return_dict=False,
        )[0]
        return list(out.split(1))

    def guide(self, request: ImageRequest, positive: Tensor, negative: Tensor) -> Tensor:
        return negative + (request.true_cfg_scale or 1.0) * (positive - negative)

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        pipe, vae = self.pipe, self.pipe.vae
        latents = pipe._unpack_latents(latents, *size, pipe.vae_scale_factor)
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        image: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return image
