"""Z-Image: the denoiser takes lists, and its embedders see the tokens of all rows in a row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from loramux.diffusion.families.base import (
    FlowFamily,
    Row,
    Sampling,
    Text,
    TokenRanges,
    sampling_of,
    timesteps_of,
)
from loramux.types.image import ImageRequest

# The denoiser pads the tokens of each row to a multiple of this.
_TOKEN_MULTIPLE = 32


class ZImage(FlowFamily):
    name = "z-image"
    pipeline_class = "ZImagePipeline"
    default_steps = 50
    default_guidance = 5.0
    needs_equal_text = False
    takes_image = True

    @property
    def own_size(self) -> int:
        return 1024

    def is_guided(self, request: ImageRequest) -> bool:
        return self.guidance(request) > 0

    def encode(self, text: str, length: int) -> Text:
        embeds, _ = self.pipe.encode_prompt(
            text,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return {"embeds": embeds[0]}

    def start(self, request: ImageRequest, scheduler: Any, generator: torch.Generator) -> Sampling:
        high, wide = (2 * (side // self.size_factor) for side in (request.height, request.width))
        shape = (1, self.pipe.transformer.in_channels, high, wide)
        self.set_timesteps(scheduler, request.steps, (high // 2) * (wide // 2))
        beginning = self.begin(request, scheduler, generator, shape, torch.float32)
        return sampling_of(request, scheduler, generator, beginning)

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        images = [row.sampling.latents.to(self.dtype)[0].unsqueeze(1) for row in rows]
        out = self.pipe.transformer(
            images,
            (1000 - timesteps_of(rows)) / 1000,
            [row.text["embeds"] for row in rows],
            return_dict=False,
        )[0]
        return [-image.float().squeeze(1)[None] for image in out]

    def token_ranges(self, rows: Sequence[Row]) -> TokenRanges:
        images = _ranges([self.num_tokens(row.sampling.request) for row in rows])
        captions = _ranges([len(row.text["embeds"]) for row in rows])
        embedders = self.pipe.transformer.all_x_embedder
        return {f"all_x_embedder.{name}": images for name in embedders} | {
            "cap_embedder.1": captions
        }

    def guide(self, request: ImageRequest, positive: Tensor, negative: Tensor) -> Tensor:
        """Return the scale, of which 0 is the positive prediction alone."""
        return positive + self.guidance(request) * (positive - negative)

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        vae = self.pipe.vae
        latents = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        image: Tensor = vae.decode(latents, return_dict=False)[0]
        return image


def _ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    padded = (length + (-length) % _TOKEN_MULTIPLE for length in lengths)
    return list(pairwise(accumulate(padded, initial=0)))
