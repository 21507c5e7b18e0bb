"""What a file says about its origin: the model it is for, and the words that it was trained on."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping

MAX_TRIGGER_WORDS = 8
MAX_BASE_CHARACTERS = 200
# Fields in which trainers note the base.
_BASE_FIELDS = ("modelspec.architecture", "ss_base_model_version", "base_model")
# Parts of names that only one kind of denoiser has, and the class of that denoiser.
_MARKS: tuple[tuple[str, str], ...] = (
    (
        r"(double|single)_stream_modulation|to_(added_)?qkv(_mlp_proj)?\b|time_guidance_embed"
        r"|ff(_context)?[._]linear_(in|out)",
        "FLUX.2",
    ),
    (
        r"double_blocks[._]\d+[._](img|txt)_mod|single_blocks[._]\d+[._]modulation|vector_in"
        r"|time_text_embed[._]guidance|proj_mlp|single_transformer_blocks[._]\d+[._]norm",
        "FLUX.1",
    ),
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


def family_of_keys(keys: Iterable[str]) -> str | None:
    """Return the kind of denoiser whose names most of the keys have; None: no known one.

    FLUX is either of FLUX.1 and FLUX.2, which share some names.
    """
    found = (next((kind for mark, kind in _MARKS if re.search(mark, key)), None) for key in keys)
    counts = Counter(kind for kind in found if kind is not None)
    if not counts:
        return None
    version = max(("FLUX.1", "FLUX.2"), key=counts.__getitem__)
    if counts[version]:
        counts[version] += counts.pop("FLUX", 0)
    return counts.most_common(1)[0][0]


def declared_base(metadata: Mapping[str, object]) -> str | None:
    """Return the base that the trainer noted."""
    found = (metadata.get(name) for name in _BASE_FIELDS)
    given = next((one for one in found if isinstance(one, str) and one.strip()), None)
    return None if given is None else given.strip()[:MAX_BASE_CHARACTERS]


def trigger_words(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words that call the adapter up, as its trainer noted them.

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
