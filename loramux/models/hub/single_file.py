"""Which components of a pipeline a single file has, by the names of its tensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

from loramux.errors import UnsupportedModel
from loramux.models.hub.pipeline_files import components_of

MAX_HEADER_BYTES = 100 * 2**20
_LENGTH_BYTES = 8
# The first parts of names -> the part of the model, as ComfyUI, A1111 and Stability save it.
_PREFIXES = {
    "first_stage_model.": "vae",
    "vae.": "vae",
    "cond_stage_model.": "clip_l",
    "conditioner.embedders.0.": "clip_l",
    "conditioner.embedders.1.": "clip_g",
    "text_encoders.clip_l.": "clip_l",
    "text_encoders.clip_g.": "clip_g",
    "text_encoders.t5xxl.": "t5",
}
_DENOISERS = ("unet", "transformer")


def parts_of(file: Path) -> frozenset[str]:
    """Return vae, clip_l, clip_g and t5 as far as the file has them; empty for a denoiser alone."""
    return frozenset(
        part
        for name in _names(file)
        for prefix, part in _PREFIXES.items()
        if name.startswith(prefix)
    )


def components_in(index: Path, parts: Collection[str]) -> list[str]:
    """Return the components of a pipeline whose weights a file with these parts has."""
    fields = json.loads(index.read_bytes())
    return [
        name
        for name in components_of(index)
        if name in _DENOISERS or _part_of(name, str(fields[name][1])) in parts
    ]


def _part_of(component: str, kind: str) -> str | None:
    if component == "vae":
        return "vae"
    if kind.startswith("T5"):
        return "t5"
    if kind.startswith("CLIPText"):
        return "clip_l" if component == "text_encoder" else "clip_g"
    return None


def _names(file: Path) -> Iterator[str]:
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 0 < size <= min(MAX_HEADER_BYTES, file.stat().st_size):
                raise ValueError("it has no header of safetensors")
            yield from json.loads(opened.read(size))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file} cannot be read as a .safetensors file: {error}") from error
