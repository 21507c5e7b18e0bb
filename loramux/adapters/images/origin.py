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
    """Returns the kind of denoiser whose names most of the keys have; None: no known one."""
    counts = Counter(kind for key in keys for mark, kind in _MARKS if re.search(mark, key))
    return counts.most_common(1)[0][0] if counts else None


def declared_base(metadata: Mapping[str, object]) -> str | None:
    """Returns the base that the trainer noted."""
    found = (metadata.get(name) for name in _BASE_FIELDS)
    given = next((one for one in found if isinstance(one, str) and one.strip()), None)
    return None if given is None else given.strip()[:MAX_BASE_CHARACTERS]


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
