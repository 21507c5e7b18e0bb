"""Stable Diffusion XL: a UNet with two rows per guided image, and samplers of several kinds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.diffusion.families.base import (
    Family,
    Row,
    Sampling,
    Text,
    sample_latents,
    sampling_of,
    stacked,
    timesteps_of,
    unsupported,
)
from loramux.diffusion.families.clip_prompts import Chunk, chunks_of, encode_chunks
from loramux.types.emphasis import Fragment, parse_emphasis
from loramux.types.image import ImageRequest


class Sdxl(Family):
    name = "sdxl"
    pipeline_class = "StableDiffusionXLPipeline"
    has_graphs = True
    denoiser = "unet"
    text_encoders = ("text_encoder", "text_encoder_2")
    default_steps = 30
    default_guidance = 5.0
    default_length = 77
    needs_equal_text = False
    length_tokenizer = ""
    weighs_words = True
    takes_image = True
    draws_masked_image = True

    def check_pipeline(self) -> None:
        channels = self.pipe.unet.config.in_channels
        if channels != self.pipe.vae.config.latent_channels:
            raise unsupported(
                self.pipe,
                f"its UNet has {channels} input channels, those of an inpainting model take mask "
                "and image beside the latents. Models with 4 channels inpaint, too",
            )
        if self.pipe.unet.config.time_cond_proj_dim is not None:
            raise unsupported(self.pipe, "its UNet takes the guidance as an embedding (LCM)")

    @property
    def size_factor(self) -> int:
        return int(self.pipe.vae_scale_factor)

    def num_tokens(self, request: ImageRequest) -> int:
        side = 2 * int(self.pipe.vae_scale_factor)
        return (request.width // side) * (request.height // side)

    def encode(self, text: str, length: int) -> Text:
        return self._encode([Fragment(text)])

    def encode_weighed(self, text: str, length: int, *, is_negative: bool) -> Text:
        param = "negative_prompt" if is_negative else "prompt"
        fragments = parse_emphasis(text, param=param)
        return self._encode(fragments) if text else self.encode_negative(text, length)

    def _encode(self, fragments: Sequence[Fragment]) -> Text:
        """Encode a prompt of any length; the pooled embedding is that of its first chunk."""
        parts = [("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2")]
        pairs = [(getattr(self.pipe, encoder), getattr(self.pipe, name)) for encoder, name in parts]
        pairs = [(encoder, tokenizer) for encoder, tokenizer in pairs if encoder is not None]
        chunks = [chunks_of(tokenizer, fragments) for _, tokenizer in pairs]
        count = max(map(len, chunks))
        states = []
        for (encoder, tokenizer), each in zip(pairs, chunks, strict=True):
            padded = [*each, *[Chunk((), ())] * (count - len(each))]
            state, out = encode_chunks(encoder, tokenizer, padded)
            states.append(state)
        # The last encoder projects its pooled output.
        embeds = torch.cat(states, dim=-1).to(pairs[-1][0].dtype)
        return {"embeds": embeds.to(self.device), "pooled": out[0][:1].to(self.device)}

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
        size = (request.height, request.width)
        sampling = sampling_of(
            request,
            scheduler,
            generator,
            self.begin(request, scheduler, generator, shape),
            time_ids=torch.tensor([[*size, 0, 0, *size]], dtype=self.dtype).to(self.device),
        )
        accepted = inspect.signature(scheduler.step).parameters
        options = {"generator": generator, "eta": 0.0}
        sampling.step_options = {name: v for name, v in options.items() if name in accepted}
        return sampling

    def first_step(self, steps: int, strength: float) -> int:
        return steps - int(steps * strength)

    def first_scale(self, scheduler: Any) -> float | Tensor:
        scale: float | Tensor = scheduler.init_noise_sigma
        return scale

    def encode_image(self, image: Tensor, generator: torch.Generator) -> Tensor:
        with self._upcast_vae(is_needed=bool(self.pipe.vae.config.force_upcast)):
            vae = self.pipe.vae
            latents = sample_latents(vae, image.to(vae.dtype), generator).to(self.dtype)
        mean, std = self._vae_statistics(latents)
        scaled: Tensor = (latents - mean) * vae.config.scaling_factor / std
        return scaled

    def _stacked_embeds(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings of all rows, and a mask where prompts differ in length."""
        embeds = [row.text["embeds"] for row in rows]
        lengths = [one.shape[1] for one in embeds]
        most = max(lengths)
        if min(lengths) == most:
            return torch.cat(embeds), None
        padded = [F.pad(one, (0, 0, 0, most - one.shape[1])) for one in embeds]
        places = torch.arange(most, device=self.device)
        mask = places[None] < torch.tensor(lengths, device=self.device)[:, None]
        return torch.cat(padded), mask

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        embeds, mask = self._stacked_embeds(rows)
        inputs = [
            row.sampling.scheduler.scale_model_input(row.sampling.latents, row.sampling.timestep)
            for row in rows
        ]
        out = self.pipe.unet(
            torch.cat(inputs).to(self.dtype),
            timesteps_of(rows),
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
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
        mean, std = self._vae_statistics(latents)
        latents = latents * std / vae.config.scaling_factor + mean
        is_half = vae.dtype == torch.float16
        with self._upcast_vae(is_needed=is_half and bool(vae.config.force_upcast)):
            image: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return image

    def _vae_statistics(self, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """Mean and deviation of the channels of the latents."""
        config = self.pipe.vae.config
        if config.get("latents_mean") is None or config.get("latents_std") is None:
            return 0.0, 1.0
        mean, std = (
            torch.tensor(config[name]).view(1, -1, 1, 1).to(like)
            for name in ("latents_mean", "latents_std")
        )
        return mean, std

    @contextmanager
    def _upcast_vae(self, *, is_needed: bool) -> Iterator[None]:
        """Decode in float32: this VAE overflows in float16."""
        vae = self.pipe.vae
        kept = vae.dtype
        if is_needed and kept != torch.float32:
            vae.to(torch.float32)
        try:
            yield
        finally:
            if vae.dtype != kept:
                vae.to(kept)
