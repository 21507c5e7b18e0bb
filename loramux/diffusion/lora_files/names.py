"""All names under which LoRA files may address the modules of one pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loramux.diffusion.lora_files.original_names import ORIGINALS
from loramux.diffusion.lora_files.unet_names import processor_name, sgm_names
from loramux.diffusion.targets import Target, pipeline_targets

_DENOISER_PREFIXES = (
    ("base_model.model.", "PEFT"),
    ("diffusion_model.", "ComfyUI"),
    ("", "without a component"),
)
_FLAT_PREFIXES = (("lora_unet_", "kohya"), ("lycoris_", "LyCORIS"))
_ORIGINAL_PREFIXES = (("base_model.model.", ""), ("diffusion_model.", "ComfyUI, "), ("", ""))


@dataclass(frozen=True, slots=True)
class Named:
    """What a name in a file stands for."""

    component: str
    paths: tuple[str, ...]
    """Several paths: rows of the file's matrix belong to them one after the other."""
    style: str
    swaps_halves: bool = False

    def is_same_place(self, other: Named) -> bool:
        return (self.component, self.paths) == (other.component, other.paths)


class PipelineNames:
    """Maps names in files to the modules of a pipeline; the names come from the pipeline itself."""

    def __init__(self, pipe: Any, denoiser: str, text_encoders: tuple[str, ...]) -> None:
        self.denoiser = denoiser
        self.denoiser_class = type(getattr(pipe, denoiser)).__name__
        self.targets: Mapping[str, Mapping[str, Target]] = pipeline_targets(
            pipe, (denoiser, *text_encoders)
        )
        self._names: dict[str, Named | None] = {}
        """None: the name stands for several modules."""
        for name, named in self._spellings(pipe):
            known = self._names.setdefault(name, named)
            if known is not None and not known.is_same_place(named):
                self._names[name] = None

    def find(self, name: str) -> Named | None:
        return self._names.get(name)

    def is_ambiguous(self, name: str) -> bool:
        return name in self._names and self._names[name] is None

    def _spellings(self, pipe: Any) -> Iterator[tuple[str, Named]]:
        for component, targets in self.targets.items():
            net = getattr(pipe, component)
            if component == self.denoiser:
                yield from self._denoiser_names(component, net, targets)
            else:
                yield from _encoder_names(component, net, targets)

    def _denoiser_names(
        self, component: str, net: Any, targets: Mapping[str, Target]
    ) -> Iterator[tuple[str, Named]]:
        flat = (*_FLAT_PREFIXES, (f"lora_{component}_", "kohya"))
        sgm = sgm_names(targets, net.config.layers_per_block) if component == "unet" else {}
        for path in targets:
            place = (component, (path,))
            yield f"{component}.{path}", Named(*place, "diffusers")
            yield f"{component}.{processor_name(path)}", Named(*place, "old diffusers")
            for prefix, style in _DENOISER_PREFIXES:
                yield prefix + path, Named(*place, style)
            for prefix, style in flat:
                yield prefix + _flat(path), Named(*place, style)
                if path in sgm:
                    yield prefix + _flat(sgm[path]), Named(*place, f"{style}, original blocks")
        originals = ORIGINALS.get(type(net).__name__)
        for original in () if originals is None else originals(net):
            if not targets.keys() >= set(original.paths):
                continue
            rest = (original.paths, original.style, original.swaps_halves)
            for prefix, style in (*_ORIGINAL_PREFIXES, (f"{component}.", "")):
                named = Named(component, rest[0], style + rest[1], rest[2])
                yield prefix + original.name, named
            for prefix, style in flat:
                named = Named(component, rest[0], f"{style}, {rest[1]}", rest[2])
                yield prefix + _flat(original.name), named


def _encoder_names(
    component: str, net: Any, targets: Mapping[str, Target]
) -> Iterator[tuple[str, Named]]:
    number = int(component.rpartition("_")[2]) if component[-1].isdigit() else 1
    if "T5" in type(net).__name__:
        # kohya numbers the text encoders CLIP-L, CLIP-G, T5, whichever of them a model has.
        # Older versions number the two of FLUX 1 and 2.
        flat: tuple[str, ...] = ("lora_te3_", f"lora_te{number}_")
        dotted = "text_encoders.t5xxl.transformer."
    elif number == 1:
        flat = ("lora_te1_", "lora_te_")
        dotted = "text_encoders.clip_l.transformer."
    else:
        flat = (f"lora_te{number}_",)
        dotted = "text_encoders.clip_g.transformer."
    for path in targets:
        place = (component, (path,))
        # Some versions of transformers have this level, some do not.
        bare = path.removeprefix("text_model.")
        for spelled in (bare, f"text_model.{bare}"):
            yield f"{component}.{spelled}", Named(*place, "diffusers")
            yield dotted + spelled, Named(*place, "ComfyUI")
            for prefix in flat:
                yield prefix + _flat(spelled), Named(*place, "kohya")


def _flat(name: str) -> str:
    return name.replace(".", "_")
