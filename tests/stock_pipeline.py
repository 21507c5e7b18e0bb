"""diffusers' own pipelines, one request after another: the oracle of image families."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from torch import Tensor

from loramux.diffusion.adapter import ImageAdapter
from loramux.diffusion.families.find import find_family
from loramux.diffusion.samplers import SamplerFactory
from loramux.types.image import ImageRequest, SourceImage
from loramux.types.request import Selection
from tests.image_factory import (
    STOCK_OPTIONS,
    load_stock_lora,
    make_pipeline,
    open_image,
    peft_tensors,
)

# For a source image without and with a mask.
SOURCE_PIPELINES: dict[str, tuple[Any, Any]] = {
    "sdxl": (
        diffusers.StableDiffusionXLImg2ImgPipeline,
        diffusers.StableDiffusionXLInpaintPipeline,
    ),
    "flux": (diffusers.FluxImg2ImgPipeline, diffusers.FluxInpaintPipeline),
    "sd3": (diffusers.StableDiffusion3Img2ImgPipeline, diffusers.StableDiffusion3InpaintPipeline),
    "qwen_image": (diffusers.QwenImageImg2ImgPipeline, diffusers.QwenImageInpaintPipeline),
    "z_image": (diffusers.ZImageImg2ImgPipeline, diffusers.ZImageInpaintPipeline),
}


class StockPipeline:
    """An unchanged pipeline of diffusers, which draws one request after another.

    Deltas are merged into the weights for the components that its loader does not know.
    """

    def __init__(self, name: str, adapters: Sequence[ImageAdapter]) -> None:
        self.name = name
        self.pipe = make_pipeline(name)
        self._samplers = SamplerFactory(self.pipe.scheduler)
        self._loadable = tuple(self.pipe._lora_loadable_modules)
        self._adapters = {adapter.cid: adapter for adapter in adapters}
        for adapter in adapters:
            tensors = {
                key: value
                for key, value in peft_tensors(adapter).items()
                if key.startswith(tuple(f"{part}." for part in self._loadable))
            }
            load_stock_lora(self.pipe, tensors, adapter.cid)

    def know(self, adapter: ImageAdapter) -> None:
        """Make an adapter known that its loader has loaded in full."""
        self._adapters[adapter.cid] = adapter

    def draw(self, request: ImageRequest) -> Tensor:
        pipe = self.pipe
        self._select(request.selection)
        merged = self._merged(request.selection)
        options = dict(STOCK_OPTIONS[self.name])
        if request.negative_prompt and self.name != "flux2":
            options["negative_prompt"] = request.negative_prompt
        for field in ("guidance_scale", "true_cfg_scale", "max_sequence_length"):
            if getattr(request, field) is not None:
                options[field] = getattr(request, field)
        kept = self.pipe.scheduler
        # diffusers 0.42.1 decodes what SD3 inpaints without the shift of the latents.
        is_unshifted = self.name == "sd3" and request.source is not None and request.source.mask
        if request.source is not None:
            pipe = self._source_pipeline(request.source)
            options |= self._source_options(request.source)
            family = find_family(type(self.pipe).__name__)
            if family.takes_guidance:  # These pipelines have other defaults.
                options.setdefault("guidance_scale", family.default_guidance)
        if (self.name, type(pipe).__name__) != ("sdxl", "StableDiffusionXLImg2ImgPipeline"):
            options |= {"height": request.height, "width": request.width}
        pipe.scheduler = self._samplers.make(request.sampler)
        try:
            out = pipe(
                prompt=request.prompt,
                num_inference_steps=request.steps,
                output_type="latent" if is_unshifted else "np",
                generator=torch.Generator().manual_seed(request.seed),
                **options,
            )
        finally:
            self.pipe.scheduler = kept
            for module, weight in merged:
                module.weight.data = weight
        if is_unshifted:
            config = pipe.vae.config
            decoded = pipe.vae.decode(out.images / config.scaling_factor + config.shift_factor)
            return (decoded.sample[0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).detach()
        images = out.frames[:, 0] if hasattr(out, "frames") else out.images
        return torch.from_numpy(images[0])

    def _source_pipeline(self, source: SourceImage) -> Any:
        """Return the pipeline of diffusers for images, with the same components."""
        kind = SOURCE_PIPELINES[self.name][source.mask is not None]
        parameters = inspect.signature(kind.__init__).parameters
        more = {"add_watermarker": False} if "add_watermarker" in parameters else {}
        components = self.pipe.components
        pipe = kind(**{k: v for k, v in components.items() if k in parameters}, **more)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _source_options(self, source: SourceImage) -> dict[str, Any]:
        options = {"image": open_image(source.image), "strength": source.strength}
        if source.mask is not None:
            options["mask_image"] = open_image(source.mask)
        return options

    def _select(self, selection: Selection) -> None:
        if not self._adapters:
            return
        if not selection:
            self.pipe.disable_lora()
            return
        self.pipe.enable_lora()
        self.pipe.set_adapters([cid for cid, _ in selection], [weight for _, weight in selection])

    def _merged(self, selection: Selection) -> list[tuple[Any, Tensor]]:
        """Merge the deltas that the loader left out; return the modules and old weights."""
        old = []
        for cid, weight in selection:
            for component, modules in self._adapters[cid].components.items():
                if component in self._loadable:
                    continue
                for path, pair in modules.items():
                    module = getattr(self.pipe, component).get_submodule(path)
                    old.insert(0, (module, module.weight.data))
                    module.weight.data = module.weight.data + weight * pair.delta()
        return old
