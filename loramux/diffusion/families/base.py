"""The interface between the step loop and one family of image models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.diffusion.families.beginning import Beginning, Kept, add_noise
from loramux.diffusion.model_facts import ModelFacts
from loramux.diffusion.source import decode_source
from loramux.errors import InvalidRequest, UnsupportedModel
from loramux.types.image import ImageRequest, SourceImage

Text = dict[str, Tensor]
"""The conditioning of one row: what the denoiser takes of one encoded prompt."""
TokenRanges = Mapping[str, Sequence[tuple[int, int]]]
"""Module path -> first and last token of each row, where a module sees all rows as one sequence."""


@dataclass(slots=True, eq=False)
class Sampling:
    """The state of one image between two steps: latents, sampler and generator are its own."""

    request: ImageRequest
    scheduler: Any
    generator: torch.Generator
    latents: Tensor
    timesteps: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the denoiser that depend on the size alone, such as position ids."""
    step_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the sampler's step()."""
    first: int = 0
    """The place of the first timestep among those of the sampler."""
    kept: Kept | None = None
    position: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @property
    def timestep(self) -> Tensor:
        return self.timesteps[self.position]

    def advance(self, prediction: Tensor) -> None:
        step = self.scheduler.step(
            prediction, self.timestep, self.latents, return_dict=False, **self.step_options
        )
        self.latents = step[0]
        self.position += 1
        if self.kept is not None:
            following = self.timestep if self.position < self.num_steps else None
            self.latents = self.kept.restored(self.latents, self.scheduler, following)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row of a forward: an image and the text that it is conditioned on."""

    sampling: Sampling
    text: Text


class Family(ABC):
    """What differs between image models: prompts, noise, one forward, guidance, and the decoder."""

    name: ClassVar[str]
    pipeline_class: ClassVar[str]
    denoiser: ClassVar[str] = "transformer"
    text_encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    default_steps: ClassVar[int] = 28
    default_guidance: ClassVar[float] = 3.5
    default_length: ClassVar[int] = 512
    guidance_name: ClassVar[str] = "guidance_scale"
    """The field that sets classifier-free guidance."""
    takes_guidance: ClassVar[bool] = True
    """Whether requests may set guidance_scale."""
    needs_equal_text: ClassVar[bool] = True
    """Whether the rows of one forward must have prompts of the same padded length."""
    length_tokenizer: ClassVar[str] = "tokenizer"
    """The tokenizer whose tokens are padded or cut to the length of a prompt."""
    weighs_words: ClassVar[bool] = False
    """Whether brackets in prompts may weigh words."""
    has_graphs: ClassVar[bool] = False
    """Whether forwards of inputs of one shape do the same work, without waiting for a GPU."""
    takes_image: ClassVar[bool] = False
    """Whether a drawing may begin with a source image."""
    draws_masked_image: ClassVar[bool] = False
    """Whether diffusers also samples latents of the masked source, which nothing uses."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.facts: ModelFacts = getattr(pipe, "model_facts", ModelFacts())
        self.check_pipeline()

    # Properties of the loaded model.

    @property
    def net(self) -> nn.Module:
        net: nn.Module = getattr(self.pipe, self.denoiser)
        return net

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    @property
    def size_factor(self) -> int:
        """Width and height are multiples of this."""
        return 2 * int(self.pipe.vae_scale_factor)

    @property
    def own_size(self) -> int:
        """The side that the components were made for."""
        return int(self.pipe.default_sample_size) * int(self.pipe.vae_scale_factor)

    @property
    def default_size(self) -> int:
        """The side of an image whose request names no size."""
        side = self.facts.size or self.own_size
        return max(side // self.size_factor, 1) * self.size_factor

    def check_pipeline(self) -> None:  # noqa: B027
        """Raise UnsupportedModel for a variant of the pipeline that this family cannot run."""

    # Properties of a request.

    def check(self, request: ImageRequest) -> None:
        """Raise InvalidRequest for a request that this model cannot serve."""
        for name in ("width", "height"):
            value = getattr(request, name)
            if value % self.size_factor:
                near = max(round(value / self.size_factor), 1) * self.size_factor
                raise InvalidRequest(
                    f"{name} must be a multiple of {self.size_factor} for this model, got {value}. "
                    f"The nearest is {near}.",
                    param=name,
                )
        self.facts.check_size(request.width, request.height)
        if not self.takes_guidance and request.guidance_scale is not None:
            raise InvalidRequest(
                "This model has no guidance_scale: set true_cfg_scale and negative_prompt.",
                param="guidance_scale",
            )
        if self.guidance_name != "true_cfg_scale" and request.true_cfg_scale is not None:
            raise InvalidRequest(
                "This model has no true_cfg_scale: set guidance_scale.", param="true_cfg_scale"
            )
        if request.source is not None:
            self._check_source(request, request.source)

    def _check_source(self, request: ImageRequest, source: SourceImage) -> None:
        if not self.takes_image:
            raise InvalidRequest(
                "This model draws from text alone, and takes no image.", param="image"
            )
        if self.first_step(request.steps, source.strength) == request.steps:
            raise InvalidRequest(
                f"No step is left: {request.steps} steps with strength {source.strength:g} are "
                "less than one. Increase one of them.",
                param="strength",
            )

    def guidance(self, request: ImageRequest) -> float:
        """Return the value of guidance_scale."""
        given = request.guidance_scale
        return self.default_guidance if given is None else given

    def is_guided(self, request: ImageRequest) -> bool:
        """Whether the image has a second row, for classifier-free guidance."""
        return self.guidance(request) > 1

    def num_tokens(self, request: ImageRequest) -> int:
        """Image tokens of one row, the unit of cost."""
        return (request.width // self.size_factor) * (request.height // self.size_factor)

    def length(self, request: ImageRequest) -> int:
        default = self.facts.max_sequence_length or self.default_length
        return request.max_sequence_length or default

    def batch_key(self, request: ImageRequest) -> tuple[int, ...]:
        """Request with equal keys may share a forward."""
        size = (request.height, request.width)
        return (*size, self.length(request)) if self.needs_equal_text else size

    def warnings(self, request: ImageRequest) -> tuple[str, ...]:
        """Return what the model cannot draw of a prompt."""
        tokenizer = getattr(self.pipe, self.length_tokenizer, None)  # empty: prompts of any length
        found = self.facts.warnings(request.prompt)
        if tokenizer is None:
            return found
        count, most = len(tokenizer(request.prompt).input_ids), self.length(request)
        if count <= most:
            return found
        cut = f"The prompt has {count} tokens, and the model reads the first {most}."
        return (*found, cut)

    # The steps of one image.

    @abstractmethod
    def encode(self, text: str, length: int) -> Text:
        """Encode one prompt."""

    def encode_negative(self, text: str, length: int) -> Text:
        """Encode a negative prompt, which may be empty."""
        return self.encode(text, length)

    def encode_weighed(self, text: str, length: int, *, is_negative: bool) -> Text:
        """Encode a prompt whose brackets weigh its words."""
        raise InvalidRequest("This model does not weigh words.", param="prompt")

    @abstractmethod
    def start(self, request: ImageRequest, scheduler: Any, generator: torch.Generator) -> Sampling:
        """Draws the noise and sets the timesteps."""

    def begin(
        self,
        request: ImageRequest,
        scheduler: Any,
        generator: torch.Generator,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> Beginning:
        """Draws noise of this shape, and mixes the source image into it if there is one.

        The sampler has its timesteps.
        """

        def draw() -> Tensor:
            return draw_noise(shape, generator, dtype or self.dtype, self.device)

        timesteps = scheduler.timesteps
        if request.source is None:
            return Beginning(self.pack(draw()) * self.first_scale(scheduler), timesteps)
        source, strength = request.source, request.source.strength
        pixels = decode_source(source, request.width, request.height)
        first = self.first_step(request.steps, strength) * int(scheduler.order)
        timesteps = timesteps[first:]
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(first)
        # The order of diffusers: the generator draws the latents of the source, then the noise.
        clean = self.encode_image(pixels.image.to(self.device, self.dtype), generator)
        noise = draw()
        latents = add_noise(scheduler, clean, noise, timesteps[:1])
        if pixels.mask is None:
            return Beginning(self.pack(latents), timesteps, first)
        if strength == 1:
            latents = noise * self.first_scale(scheduler)
        if self.draws_masked_image:
            draw()
        mask = F.interpolate(pixels.mask, size=noise.shape[-2:]).to(noise)
        kept = Kept(self.pack(clean), self.pack(noise), self.pack(mask.expand_as(noise)))
        return Beginning(self.pack(latents), timesteps, first, kept)

    def first_step(self, steps: int, strength: float) -> int:
        """Return the number of steps that a source image leaves out."""
        return int(steps - steps * strength)

    def first_scale(self, scheduler: Any) -> float | Tensor:
        """Return the deviation of the noise that an image without a source begins with."""
        return 1.0

    def encode_image(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Encode [1, 3, height, width] in [-1, 1] to latents that are not packed."""
        vae = self.pipe.vae
        latents = sample_latents(vae, image.to(vae.dtype), generator)
        shifted: Tensor = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        return shifted

    def pack(self, latents: Tensor) -> Tensor:
        """Arranges the VAE's latents for the denoiser."""
        return latents

    @abstractmethod
    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Run the denoiser once; return the prediction of each row, with a leading 1."""

    def token_ranges(self, rows: Sequence[Row]) -> TokenRanges:
        return {}

    def guide(self, request: ImageRequest, positive: Tensor, negative: Tensor) -> Tensor:
        """Combine the two predictions of an image with classifier-free guidance."""
        return negative + self.guidance(request) * (positive - negative)

    def predicted(self, sampling: Sampling, prediction: Tensor) -> Tensor:
        """Return the clean latents that a prediction means, before the sampler's step."""
        sigma: Tensor = sampling.scheduler.sigmas[sampling.first + sampling.position]
        return sampling.latents - sigma * prediction

    @abstractmethod
    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """Decode images of one (height, width) to [rows, 3, height, width] in [-1, 1]."""

    def images(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """Decode to [rows, height, width, 3] in [0, 1]."""
        decoded = self.decode(latents, size)
        return (decoded / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().cpu()


class FlowFamily(Family):
    """A family with flow matching, whose shift of sigmas may depend on the size of the image."""

    def set_timesteps(self, scheduler: Any, steps: int, image_tokens: int) -> None:
        config = scheduler.config
        sigmas = None
        if not config.get("use_flow_sigmas", False):
            sigmas = np.linspace(1.0, 1 / steps, steps)
        options = {"num_inference_steps": steps} if sigmas is None else {"sigmas": sigmas}
        scheduler.set_timesteps(device=self.device, mu=self.shift(config, image_tokens), **options)
        scheduler.set_begin_index(0)

    def shift(self, config: Mapping[str, Any], image_tokens: int) -> float:
        """Interpolates the shift of sigmas linearly in the number of image tokens."""
        low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        slope = (most - least) / (high - low)
        return float(image_tokens * slope + (least - slope * low))


def sampling_of(
    request: ImageRequest,
    scheduler: Any,
    generator: torch.Generator,
    beginning: Beginning,
    **extra: Tensor,
) -> Sampling:
    """`extra`: inputs of the denoiser that depend on the size alone."""
    return Sampling(
        request=request,
        scheduler=scheduler,
        generator=generator,
        latents=beginning.latents,
        timesteps=beginning.timesteps,
        extra=extra,
        first=beginning.first,
        kept=beginning.kept,
    )


def latents_of(rows: Sequence[Row]) -> Tensor:
    return torch.cat([row.sampling.latents for row in rows])


def timesteps_of(rows: Sequence[Row]) -> Tensor:
    return torch.stack([row.sampling.timestep for row in rows])


def stacked(rows: Sequence[Row], name: str) -> Tensor:
    """Concatenates one input of the rows' texts."""
    return torch.cat([row.text[name] for row in rows])


def unsupported(pipe: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"This {type(pipe).__name__} cannot be served: {reason}.")


def draw_noise(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Draws on the CPU, so that a seed gives the same noise on every device."""
    return torch.randn(shape, generator=generator, dtype=dtype).to(device)


def sample_latents(vae: Any, image: Tensor, generator: torch.Generator) -> Tensor:
    """Sample the latents of an image from the distribution that the VAE encodes it to.

    AutoencoderTiny encodes it to latents themselves.
    """
    encoded = vae.encode(image)
    latents: Tensor = (
        encoded.latent_dist.sample(generator) if "latent_dist" in encoded else encoded.latents
    )
    return latents
