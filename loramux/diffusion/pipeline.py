"""Loads a pipeline of diffusers from a folder."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]  # it has no marker
import diffusers
import torch
import transformers
from diffusers.loaders.single_file_utils import SingleFileComponentError

from loramux.diffusion.families.base import Family
from loramux.diffusion.families.find import find_family
from loramux.diffusion.model_facts import read_facts
from loramux.diffusion.options import PipelineFiles
from loramux.errors import InvalidRequest, UnsupportedModel
from loramux.kernels.cpu.vector_math import detect_cpu
from loramux.models.hub.pipeline_files import components_of, local_files, weights_of
from loramux.models.hub.single_file import components_in, parts_of

INDEX_NAME = "model_index.json"
# NotImplementedError: torch's, for a tensor without values.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, NotImplementedError)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_pipeline(
    place: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    files: PipelineFiles = PipelineFiles(),  # noqa: B008  (frozen)
) -> Any:
    """Load the pipeline of a folder or a file; `dtype` auto: float32 on a CPU, else bfloat16.

    Raises UnsupportedModel before any weight is read, if its class is not served.
    """
    detect_cpu()
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise InvalidRequest(
            f"dtype must be auto, {', '.join(DTYPES)}, got {dtype}.", param="dtype"
        )
    folder = Path(files.config) if files.config and place.is_file() else place
    name = pipeline_class(folder)
    family = find_family(name)
    try:
        with _quiet():
            kind = getattr(diffusers, name)
            parts = parts_of(place) if place.is_file() else frozenset()
            if parts:
                pipe = _from_checkpoint(kind, place, folder, parts, DTYPES[dtype], files.variant)
            else:
                own = {}
                if place.is_file():
                    own = {family.denoiser: _denoiser_of(place, folder, family.denoiser, dtype)}
                pipe = _from_folder(kind, folder, own, DTYPES[dtype], files.variant)
        _check_complete(pipe)
    except (*_UNREADABLE, SingleFileComponentError) as error:
        raise UnsupportedModel(f"The pipeline in {place} cannot be loaded: {error}") from error
    pipe.model_facts = read_facts(folder)
    pipe.set_progress_bar_config(disable=True)
    if files.is_offloaded and device != "cpu":
        offload(pipe, family, device)
    else:
        pipe.to(device)
    return pipe


def _from_folder(
    kind: Any, folder: Path, own: dict[str, Any], dtype: torch.dtype, variant: str | None
) -> Any:
    """Load a pipeline with `own` components, and all others of the folder."""
    names = [one for one in components_of(folder / INDEX_NAME) if one not in own]
    _, variant = weights_of(local_files(folder), names, variant)
    return kind.from_pretrained(
        folder,
        variant=variant,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        **own,
    )


def _from_checkpoint(
    kind: Any,
    file: Path,
    folder: Path,
    parts: frozenset[str],
    dtype: torch.dtype,
    variant: str | None,
) -> Any:
    """Load a file with a whole pipeline, and what it lacks from the folder of its configuration."""
    if not hasattr(kind, "from_single_file"):
        raise UnsupportedModel(
            f"diffusers reads no file with all components of a {kind.__name__}. Give its folder, "
            "or the denoiser alone as the file."
        )
    index = folder / INDEX_NAME
    given = components_in(index, parts)
    kinds = json.loads(index.read_bytes())
    lacking = [
        name
        for name in components_of(index)
        if name not in given and (folder / name / "config.json").exists()
    ]
    _, variant = weights_of(local_files(folder), lacking, variant)
    others = {
        name: getattr(importlib.import_module(kinds[name][0]), kinds[name][1]).from_pretrained(
            folder,
            subfolder=name,
            variant=variant,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
        )
        for name in lacking
    }
    return kind.from_single_file(
        str(file), config=str(folder), torch_dtype=dtype, local_files_only=True, **others
    )


def _check_complete(pipe: Any) -> None:
    """Refuse a component whose file lacks tensors: diffusers leaves them without values."""
    for name, component in pipe.components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        for path, parameter in component.named_parameters():
            if parameter.is_meta:
                raise UnsupportedModel(f"{name} has no values for {path}: its file is not complete")


def _denoiser_of(file: Path, folder: Path, component: str, dtype: str) -> Any:
    """Load the denoiser of a single file with the configuration that a folder has for it."""
    index = json.loads((folder / INDEX_NAME).read_bytes())
    kind = getattr(diffusers, index[component][1])
    return kind.from_single_file(
        str(file),
        config=str(folder),
        subfolder=component,
        torch_dtype=DTYPES[dtype],
        local_files_only=True,
    )


def offload(pipe: Any, family: type[Family], device: str) -> None:
    """Keep the denoiser on the device, and all others there only while they work.

    Each leaves the device when the next one begins.
    """
    getattr(pipe, family.denoiser).to(device)
    names = [*family.text_encoders, "vae"]
    parts = [part for name in names if (part := getattr(pipe, name, None)) is not None]
    last = None
    hooks = []
    for part in parts:
        _, last = accelerate.cpu_offload_with_hook(part, device, prev_module_hook=last)
        hooks.append(last)
    # A ring: the first of the next prompt takes the place of the last.
    hooks[0].hook.prev_module_hook = last


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out progress bars, and notices of transformers and diffusers that need no action."""
    log = logging.getLogger("diffusers.pipelines.pipeline_utils")
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    verbosity = transformers.utils.logging.get_verbosity()
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    log.addFilter(_is_of_use)
    transformers.utils.logging.set_verbosity(logging.ERROR)
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()
        transformers.utils.logging.set_verbosity(verbosity)
        log.removeFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a warning of diffusers is not the one of an AutoencoderTiny, which pipelines take."""
    return not record.getMessage().startswith("Expected types for vae")


def pipeline_class(folder: Path) -> str:
    """Return the class that model_index.json names; raise UnsupportedModel without one."""
    index = folder / INDEX_NAME
    try:
        name = json.loads(index.read_bytes())["_class_name"]
    except FileNotFoundError as error:
        raise UnsupportedModel(
            f"{folder} has no {INDEX_NAME}: an image model is a folder that diffusers saved."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{index} cannot be read: {error!r}") from error
    return str(name)
