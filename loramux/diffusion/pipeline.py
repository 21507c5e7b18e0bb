"""Loads a pipeline of diffusers from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch

from loramux.diffusion.families.find import find_family
from loramux.errors import InvalidRequest, UnsupportedModel

INDEX_NAME = "model_index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_pipeline(folder: Path, *, dtype: str = "auto", device: str = "cpu") -> Any:
    """Loads the pipeline; `dtype` auto: float32 on a CPU, else bfloat16.

    Raises UnsupportedModel before any weight is read, if its class is not served.
    """
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise InvalidRequest(
            f"dtype must be auto, {', '.join(DTYPES)}, got {dtype}.", param="dtype"
        )
    name = pipeline_class(folder)
    find_family(name)
    try:
        pipe = getattr(diffusers, name).from_pretrained(
            folder, dtype=DTYPES[dtype], local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"The pipeline in {folder} cannot be loaded: {error}") from error
    pipe.set_progress_bar_config(disable=True)
    pipe.to(device)
    return pipe


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
