"""Loads a pipeline of diffusers from a folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from loramux.diffusion.families.find import find_family
from loramux.diffusion.model_facts import read_facts
from loramux.errors import InvalidRequest, UnsupportedModel
from loramux.kernels.cpu.vector_math import detect_cpu

INDEX_NAME = "model_index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_pipeline(folder: Path, *, dtype: str = "auto", device: str = "cpu") -> Any:
    """Loads the pipeline; `dtype` auto: float32 on a CPU, else bfloat16.

    Raises UnsupportedModel before any weight is read, if its class is not served.
    """
    detect_cpu()
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise InvalidRequest(
            f"dtype must be auto, {', '.join(DTYPES)}, got {dtype}.", param="dtype"
        )
    name = pipeline_class(folder)
    find_family(name)
    try:
        with _quiet():
            pipe = getattr(diffusers, name).from_pretrained(
                folder, dtype=DTYPES[dtype], local_files_only=True, use_safetensors=True
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"The pipeline in {folder} cannot be loaded: {error}") from error
    pipe.model_facts = read_facts(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.to(device)
    return pipe


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
    """Returns the class that model_index.json names; raises UnsupportedModel without one."""
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
