"""Bodies and replies of the routes for images."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from loramux.backend.images import ImageFormat

MAX_IMAGES = 10


class NamedLora(Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter as other servers name it; all names are those of served adapters."""

    name: str | None = None
    lora_name: str | None = None
    adapter: str | None = None
    path: str | None = None
    scale: float | None = None
    lora_scale: float | None = None


class ImageGeneration(Struct, kw_only=True):
    """The body of POST /v1/images/generations; see near_misses.py on fields that are not known."""

    prompt: str
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_IMAGES)] | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: ImageFormat | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    quality: str | None = None
    background: str | None = None
    moderation: str | None = None
    style: str | None = None
    user: str | None = None
    # Extensions
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    guidance: float | None = None
    true_cfg_scale: float | None = None
    seed: int | None = None
    sampler: str | None = None
    max_sequence_length: Annotated[int, Meta(ge=1, le=1024)] | None = None
    adapters: list[str] | None = None
    adapter_weights: list[float] | None = None
    # Adapters in the words of other servers
    lora: NamedLora | None = None
    loras: list[NamedLora] | None = None
    image_loras: list[NamedLora] | None = None


class ImageEdit(ImageGeneration, kw_only=True):
    """The fields of POST /v1/images/edits beside its files."""

    strength: float | None = None
    mask_blur: float = 0.0
    input_fidelity: str | None = None


class JsonImageEdit(ImageEdit, kw_only=True):
    """The body of POST /v1/images/edits as JSON; its files are base64 or data URLs."""

    image: str | list[str]
    mask: str | None = None


class ImageUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    """Image tokens times steps."""
    total_tokens: int
    input_tokens_details: dict[str, int]


class ImageData(Struct, frozen=True, kw_only=True):
    b64_json: str


class ImagesReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    created: int
    data: list[ImageData]
    output_format: str
    size: str
    usage: ImageUsage
    quality: str = msgspec.field(default_factory=lambda: "auto")
    background: str = msgspec.field(default_factory=lambda: "opaque")
    serving: dict[str, Any] | None = None
    warnings: list[str] = []
    """What the model could not draw of the prompt."""


class SheafPredict(Struct, kw_only=True, tag_field="model_type", tag="diffusion"):
    """The body of POST /{name}/predict and /{name}/stream."""

    model_name: str
    prompt: str
    request_id: str | None = None
    negative_prompt: str = ""
    height: Annotated[int, Meta(ge=64, multiple_of=8)] | None = None
    width: Annotated[int, Meta(ge=64, multiple_of=8)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=200)] = 4
    guidance_scale: Annotated[float, Meta(ge=0)] = 0.0
    seed: int | None = None
    adapters: list[str] = []
    adapter_weights: list[float] | None = None


class SheafEdit(Struct, kw_only=True, tag_field="model_type", tag="multimodal_generation"):
    """The body of POST /{name}/predict and /{name}/stream with an image."""

    model_name: str
    prompt: str
    image_b64: str
    mask_b64: str | None = None
    request_id: str | None = None
    negative_prompt: str = ""
    strength: Annotated[float, Meta(ge=0, le=1)] = 0.8
    num_inference_steps: Annotated[int, Meta(ge=1, le=200)] = 50
    guidance_scale: Annotated[float, Meta(ge=0)] = 7.5
    seed: int | None = None
    adapters: list[str] = []
    adapter_weights: list[float] | None = None


class SheafReply(Struct, frozen=True, kw_only=True):
    request_id: str
    model_type: str
    model_name: str
    metadata: dict[str, Any]
    image_b64: str
    height: int
    width: int
    seed: int


class SdDrawing(Struct, kw_only=True):
    """The fields of A1111's txt2img and img2img that are served; null is the default."""

    prompt: str = ""
    negative_prompt: str | None = None
    seed: int | None = None
    sampler_name: str | None = None
    sampler_index: str | None = None
    scheduler: str | None = None
    batch_size: Annotated[int, Meta(ge=1)] | None = None
    n_iter: Annotated[int, Meta(ge=1)] | None = None
    steps: int | None = None
    cfg_scale: float | None = None
    distilled_cfg_scale: float | None = None
    width: int | None = None
    height: int | None = None
    eta: float | None = None
    denoising_strength: float | None = None
    init_images: list[str] | None = None
    mask: str | None = None
    mask_blur: float | None = None
    mask_blur_x: float | None = None
    mask_blur_y: float | None = None
    inpainting_mask_invert: int | None = None
    send_images: bool | None = None
    override_settings: dict[str, Any] | None = None
    alwayson_scripts: dict[str, Any] | None = None


class SdImages(Struct, kw_only=True):
    images: list[str]
    parameters: dict[str, Any]
    info: str
    """JSON"""


class SdProgressState(Struct, kw_only=True):
    skipped: bool = False
    interrupted: bool = False
    stopping_generation: bool = False
    job: str = ""
    job_count: int = 0
    job_timestamp: str = "0"
    job_no: int = 0
    sampling_step: int = 0
    sampling_steps: int = 0


class SdProgress(Struct, kw_only=True):
    progress: float
    eta_relative: float
    state: SdProgressState
    current_image: str | None = None
    textinfo: str | None = None


class SdSampler(Struct, kw_only=True):
    name: str
    aliases: list[str]
    options: dict[str, str]


class SdScheduler(Struct, kw_only=True):
    name: str
    label: str
    aliases: list[str] | None = None
    default_rho: float = -1.0
    need_inner_model: bool = False


class SdModel(Struct, kw_only=True):
    title: str
    model_name: str
    hash: str
    sha256: str
    filename: str
    config: str | None = None


class SdLora(Struct, kw_only=True):
    name: str
    alias: str
    path: str
    metadata: dict[str, Any]
