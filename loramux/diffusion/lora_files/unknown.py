"""Refuses tensors that have no place in a pipeline, by the model that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from loramux.adapters.images.origin import family_of_keys
from loramux.adapters.images.refusals import ImageRefusal
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.diffusion.lora_files.names import PipelineNames
from loramux.errors import AdapterRefused

_DENOISERS = {
    "FluxTransformer2DModel": "FLUX",
    "Flux2Transformer2DModel": "FLUX",
    "SD3Transformer2DModel": "Stable Diffusion 3",
    "UNet2DConditionModel": "UNet",
    "WanTransformer3DModel": "Wan",
    "QwenImageTransformer2DModel": "Qwen-Image",
    "ZImageTransformer2DModel": "Z-Image",
}


def refuse_unknown(keys: Sequence[str], num_tensors: int, names: PipelineNames) -> NoReturn:
    """Raises the refusal of tensors that have no place in the pipeline."""
    kind = family_of_keys(keys)
    own = _DENOISERS.get(names.denoiser_class)
    shown = name_some(list(keys))
    if kind is not None and own is not None and kind != own and len(keys) > num_tensors / 2:
        raise AdapterRefused(
            ImageRefusal.OTHER_FAMILY,
            f"Its tensors are named as for {kind}, and this model is {own}: {shown}.",
            fix="Use an adapter that was trained on this base.",
        )
    raise AdapterRefused(
        RefusalCode.UNKNOWN_TENSORS,
        f"{len(keys)} of {num_tensors} tensors belong to no module of this model: {shown}.",
        fix="Use an adapter that was trained on this base, or save it without these tensors.",
    )
