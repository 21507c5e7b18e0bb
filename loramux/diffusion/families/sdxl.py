"""Stable Diffusion XL: a UNet with two rows per guided image, and samplers of several kinds."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loramux.diffusion.families.base import (
    Family,
    Row,
    Sampling,
    Text,
    stacked,
    timesteps_of,
    unsupported,
)
from loramux.types.image import ImageRequest


class Sdxl(Family):
    name = "sdxl"
    pipeline_class = "StableDiffusionXLPipeline"
    denoiser = "unet"
    text_encoders = ("text_encoder", "text_encoder_2")
    default_steps = 30
    default_guidance = 5.0
    default_length = 77
    needs_equal_text = False

    def check_pipeline(self) -> None:
        if self.pipe.unet.config.time_cond_proj_dim is not None:
            raise unsupported(self.pipe, "its UNet takes the guidance as an embedding (LCM)")

    @property
    def size_factor(self) -> int:
        return int(self.pipe.vae_scale_factor)

    def num_tokens(self, request: ImageRequest) -> int:
        side = 2 * int(self.pipe.vae_scale_factor)
        return (request.width // side) * (request.height // side)

    def encode(self, text: str, length: int) -> Text:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            text, device=self.device, do_classifier_free_guidance=False
        )
        return {"embeds": embeds, "pooled": pooled}

    def encode_negative(self, text: str, length: int) -> Text:
        encoded = self.encode(text, length)
        if text or not self.pipe.config.force_zeros_for_empty_prompt:
            return encoded
        return {name: torch.zeros_like(value) for name, value in encoded.items()}

    def start(self, request: ImageRequest, scheduler: Any, generator: torch.Generator) -> Sampling:
        factor = int(self.pipe.vae_scale_factor)
        shape = (
            1,
            self.pipe.unet.config.in_channels,
            request.height // factor,
            request.width // factor,
        )
        scheduler.set_timesteps(request.steps, device=self.device)
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)
        noise = draw_noise(shape, generator, self.dtype, self.device)
        size = (request.height, request.width)
        sampling = Sampling(
            request=request,
            scheduler=scheduler,
            generator=generator,
            latents=noise * scheduler.init_noise_sigma,
            timesteps=scheduler.timesteps,
            extra={
                "time_ids": torch.tensor([[*size, 0, 0, *size]], dtype=self.dtype).to(self.device)
            },
        )
        accepted = inspect.signature(scheduler.step).parameters
        options = {"generator": generator, "eta": 0.0}
        sampling.step_options = {name: v for name, v in options.items() if name in accepted}
        return sampling

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        inputs = [
            row.sampling.scheduler.scale_model_input(row.sampling.latents, row.sampling.timestep)
            for row in rows
        ]
        out = self.pipe.unet(
            torch.cat(inputs).to(self.dtype),
            timesteps_of(rows),
            encoder_hidden_states=stacked(rows, "embeds"),
            added_cond_kwargs={
                "text_embeds": stacked(rows, "pooled"),
                "time_ids": torch.cat([row.sampling.extra["time_ids"] for row in rows]),
            },
            return_dict=False,
        )[0]
        return list(out.split(1))

    def predicted(self, sampling: Sampling, prediction: Tensor) -> Tensor:
        scheduler, latents = sampling.scheduler, sampling.latents
        alphas: Tensor = scheduler.alphas_cumprod
        alpha = alphas[int(sampling.timestep.clamp(0, len(alphas) - 1))].to(latents)
        if scheduler.init_noise_sigma > 1:
            # This sampler keeps latents without the factor of the diffusion process.
            latents = latents * alpha.sqrt()
        if scheduler.config.prediction_type == "v_prediction":
            return alpha.sqrt() * latents - (1 - alpha).sqrt() * prediction
        return (latents - (1 - alpha).sqrt() * prediction) / alpha.sqrt()

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        vae = self.pipe.vae
        is_upcast = vae.dtype == torch.float16 and vae.config.force_upcast
        if is_upcast:
            # This VAE overflows in float16.
            vae.to(torch.float32)
        config = vae.config
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            mean, std = (
                torch.tensor(config[name]).view(1, -1, 1, 1).to(latents)
                for name in ("latents_mean", "latents_std")
            )
            latents = latents * std / config.scaling_factor + mean
        else:
            latents = latents / config.scaling_factor
        image: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        if is_upcast:
            vae.to(torch.float16)
        return image


def draw_noise(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Draws on the CPU, so that a seed gives the same noise on every device."""
    return torch.randn(shape, generator=generator, dtype=dtype).to(device)
