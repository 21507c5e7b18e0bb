"""FLUX.2 Klein: each row has its own positions, and guidance adds a row with an empty prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loramux.diffusion.families.base import (
    FlowFamily,
    Row,
    Sampling,
    Text,
    draw_noise,
    latents_of,
    stacked,
    timesteps_of,
)
from loramux.types.image import ImageRequest


class Flux2Klein(FlowFamily):
    name = "flux2-klein"
    pipeline_class = "Flux2KleinPipeline"
    has_graphs = True
    default_steps = 50
    default_guidance = 4.0

    def is_guided(self, request: ImageRequest) -> bool:
        return self.guidance(request) > 1 and not self.pipe.config.is_distilled

    @property
    def text_layers(self) -> tuple[int, ...]:
        """The hidden states at a quarter, half and three quarters of the text encoder's depth."""
        depth = int(self.pipe.text_encoder.config.num_hidden_layers)
        return tuple(max(depth * part // 4, 1) for part in (1, 2, 3))

    def encode(self, text: str, length: int) -> Text:
        embeds, ids = self.pipe.encode_prompt(
            text,
            device=self.device,
            max_sequence_length=length,
            text_encoder_out_layers=self.text_layers,
        )
        return {"embeds": embeds, "ids": ids}

    def start(self, request: ImageRequest, scheduler: Any, generator: torch.Generator) -> Sampling:
        channels = self.pipe.transformer.config.in_channels
        high, wide = request.height // self.size_factor, request.width // self.size_factor
        noise = draw_noise((1, channels, high, wide), generator, self.dtype, self.device)
        latents = self.pipe._pack_latents(noise)
        return Sampling(
            request=request,
            scheduler=scheduler,
            generator=generator,
            latents=latents,
            timesteps=self._set_timesteps(scheduler, request.steps, latents.shape[1]),
            extra={"ids": self.pipe._prepare_latent_ids(noise).to(self.device)},
        )

    def _set_timesteps(self, scheduler: Any, steps: int, image_tokens: int) -> Tensor:
        options: Mapping[str, Any] = {"sigmas": np.linspace(1.0, 1 / steps, steps)}
        if scheduler.config.get("use_flow_sigmas", False):
            options = {"num_inference_steps": steps}
        mu = empirical_shift(image_tokens, steps)
        scheduler.set_timesteps(device=self.device, mu=mu, **options)
        scheduler.set_begin_index(0)
        return torch.as_tensor(scheduler.timesteps)

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        latents = latents_of(rows).to(self.dtype)
        out = self.pipe.transformer(
            hidden_states=latents,
            timestep=timesteps_of(rows).to(latents.dtype) / 1000,
            guidance=None,
            encoder_hidden_states=stacked(rows, "embeds"),
            txt_ids=stacked(rows, "ids"),
            img_ids=torch.cat([row.sampling.extra["ids"] for row in rows]),
            return_dict=False,
        )[0]
        return list(out.split(1))

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        pipe, vae = self.pipe, self.pipe.vae
        high, wide = (side // self.size_factor for side in size)
        latents = latents.transpose(1, 2).reshape(len(latents), -1, high, wide)
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(latents)
        variance = vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps
        latents = pipe._unpatchify_latents(latents * torch.sqrt(variance).to(latents) + mean)
        image: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return image


def empirical_shift(image_tokens: int, steps: int) -> float:
    """FLUX.2's shift of sigmas: linear in tokens at 10 and at 200 steps, interpolated by steps."""
    at_200 = 0.00016927 * image_tokens + 0.45666666
    if image_tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * image_tokens + 1.89833333
    slope = (at_200 - at_10) / 190.0
    return slope * steps + at_200 - 200.0 * slope
