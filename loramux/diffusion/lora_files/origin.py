"""What a file says about its origin: the model it is for, and the words that it was trained on."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.diffusion.lora_files.names import PipelineNames
from loramux.diffusion.lora_files.refusals import ImageRefusal
from loramux.errors import AdapterRefused

MAX_TRIGGER_WORDS = 8
# Parts of names that only one kind of denoiser has, and the class of that denoiser.
_MARKS: tuple[tuple[str, str], ...] = (
    (r"(double|single)_blocks|single_transformer_blocks", "FLUX"),
    (r"joint_blocks", "Stable Diffusion 3"),
    (
        r"(input|output|middle)_blocks?_|(down|up|mid)_blocks?[._]\d*[._]?(attentions|resnets)",
        "UNet",
    ),
    (r"blocks[._]\d+[._](self|cross)_attn", "Wan"),
    (r"transformer_blocks[._]\d+[._](img|txt)_(mod|mlp)", "Qwen-Image"),
    (r"layers[._]\d+[._]attention[._]", "Z-Image"),
)
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
    kind = _kind_of(keys)
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


def _kind_of(keys: Sequence[str]) -> str | None:
    counts = Counter(kind for key in keys for mark, kind in _MARKS if re.search(mark, key))
    return counts.most_common(1)[0][0] if counts else None


def trigger_words(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the words that call the adapter up, as its trainer noted them.

    They are modelspec's trigger phrase, or the most frequent tags of kohya's captions.
    """
    phrase = metadata.get("modelspec.trigger_phrase", "").strip()
    if phrase:
        return (phrase,)
    try:
        folders = json.loads(metadata.get("ss_tag_frequency", "{}"))
        counts: Counter[str] = Counter()
        for tags in folders.values():
            counts.update({str(tag).strip(): int(number) for tag, number in tags.items()})
    except (ValueError, TypeError, AttributeError):
        return ()
    return tuple(tag for tag, _ in counts.most_common(MAX_TRIGGER_WORDS) if tag)
