"""Refuses tensors that have no place in a pipeline, by the model that they are for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from loramux.adapters.images.origin import family_of_keys
from loramux.adapters.images.refusals import ImageRefusal
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.diffusion.lora_files.names import PipelineNames
from loramux.errors import AdapterRefused

_CONTROL = re.compile(r"(query|key)_norm\.scale$")
_DENOISERS = {
    "FluxTransformer2DModel": "FLUX.1",
    "Flux2Transformer2DModel": "FLUX.2",
    "SD3Transformer2DModel": "Stable Diffusion 3",
    "UNet2DConditionModel": "UNet",
    "WanTransformer3DModel": "Wan",
    "QwenImageTransformer2DModel": "Qwen-Image",
    "ZImageTransformer2DModel": "Z-Image",
}


def refuse_unknown(keys: Sequence[str], num_tensors: int, names: PipelineNames) -> NoReturn:
    """Raise the refusal of tensors that have no place in the pipeline."""
    kind = family_of_keys(keys)
    own = _DENOISERS.get(names.denoiser_class)
    shown = name_some(list(keys))
    is_other = kind is not None and own is not None and not own.startswith(kind)
    # The two versions of FLUX share the names of many modules.
    is_most = len(keys) > num_tensors / 2 or {kind, own} == {"FLUX.1", "FLUX.2"}
    if is_other and is_most:
        raise AdapterRefused(
            ImageRefusal.OTHER_FAMILY,
            f"Its tensors are named as for {kind}, and this model is {own}: {shown}.",
            fix="Use an adapter that was trained on this base.",
        )
    if any(_CONTROL.search(key) for key in keys):
        raise AdapterRefused(
            ImageRefusal.UNSERVED_METHOD,
            f"It is a control LoRA: it replaces norms of the base for all requests, and widens its "
            f"input by a control image: {shown}.",
            fix="Use an adapter that draws from text.",
        )
    changed = [key for key in keys if key.endswith((".diff", ".diff_b"))]
    if changed:
        raise AdapterRefused(
            RefusalCode.FULL_WEIGHTS,
            f"It changes norms or other parts of the base that are neither linear layers nor "
            f"convolutions: {name_some(changed)}.",
            fix="Save it without these tensors.",
        )
    raise AdapterRefused(
        RefusalCode.UNKNOWN_TENSORS,
        f"{len(keys)} of {num_tensors} tensors belong to no module of this model: {shown}.",
        fix="Use an adapter that was trained on this base, or save it without these tensors.",
    )
