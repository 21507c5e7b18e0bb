"""Loads the tensors of an adapter that may be a pickle or have dtypes that are not served."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from loramux.adapters.convert import unpickle
from loramux.adapters.peft.folder import find_file, refusing_os_errors
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    PICKLE_MAGICS,
    PICKLE_NAMES,
    WEIGHTS_NAME,
    ZIP_MAGIC,
    broken,
)
from loramux.errors import AdapterRefused

MAX_CHILD_SECONDS = 900.0
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# bfloat16 holds every value of these exactly.
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)

Tensors = dict[str, torch.Tensor]


def load_tensors(folder: Path, changes: list[str]) -> Tensors:
    """Return the tensors of a folder's weights file; append to `changes` what must be rewritten.

    A pickle is read in a child process with `weights_only` and limited resources.
    """
    path = find_file(folder, WEIGHTS_NAME)
    if path is not None and not is_pickle(path):
        with refusing_os_errors(path):
            content = path.read_bytes()
        try:
            return dict(safetensors.torch.load(content))
        except SafetensorError as error:
            raise broken(str(error)) from error
    if path is None:
        path = next(
            (found for name in PICKLE_NAMES if (found := find_file(folder, name)) is not None), None
        )
    if path is None:
        raise AdapterRefused(
            RefusalCode.WEIGHTS_MISSING,
            f"The folder has neither {WEIGHTS_NAME} nor {', '.join(PICKLE_NAMES)}.",
            fix="Give the folder that PEFT's save_pretrained wrote.",
        )
    tensors = _unpickle(path)
    changes.append(f"Wrote the tensors of the pickle {path.name} as safetensors.")
    return tensors


def is_pickle(path: Path) -> bool:
    """Return whether the file begins as one that torch.save or pickle writes."""
    with refusing_os_errors(path), path.open("rb") as file:
        start = file.read(LENGTH_BYTES + 1)
    # The length of a safetensors header may begin with the bytes of a pickle.
    return start.startswith((ZIP_MAGIC, *PICKLE_MAGICS)) and not start.endswith(b"{")


def _unpickle(path: Path) -> Tensors:
    with tempfile.TemporaryDirectory(prefix="loramux-convert-") as folder:
        written = Path(folder) / WEIGHTS_NAME
        command = [sys.executable, "-I", unpickle.__file__, str(path), str(written)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=MAX_CHILD_SECONDS, check=True
            )
            answer = json.loads(done.stdout)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            detail = "it took too long" if isinstance(error, subprocess.TimeoutExpired) else error
            raise _unreadable(path, str(detail)) from error
        if "error" in answer:
            raise _unreadable(path, answer["error"])
        return dict(safetensors.torch.load(written.read_bytes()))


def _unreadable(path: Path, detail: str) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.PICKLE,
        f"{path.name} cannot be read as tensors alone: {detail.splitlines()[0][:500]}",
        fix="It may hold code, which is never run. Save the adapter with safe_serialization=True.",
    )


def cast_tensors(tensors: Tensors, dtype: torch.dtype | None, changes: list[str]) -> Tensors:
    """Return the tensors in `dtype`; without one, only 8-bit floats are changed."""
    odd = sorted(
        f"{name} ({tensor.dtype})"
        for name, tensor in tensors.items()
        if tensor.dtype not in (*FLOATS, *EIGHT_BIT_FLOATS)
    )
    if odd:
        raise AdapterRefused(
            RefusalCode.BAD_DTYPE,
            f"Tensors must be floating point; found {name_some(odd)}.",
            fix="Dequantise the adapter where it was quantised.",
        )
    cast: Tensors = {}
    for name, tensor in tensors.items():
        is_small = tensor.dtype in EIGHT_BIT_FLOATS
        wanted = dtype or (torch.bfloat16 if is_small else tensor.dtype)
        if tensor.dtype == wanted:
            cast[name] = tensor
            continue
        wide = tensor.float() if is_small else tensor
        cast[name] = wide.to(wanted)
        if torch.isfinite(wide).all() and not torch.isfinite(cast[name]).all():
            raise AdapterRefused(
                RefusalCode.NOT_FINITE,
                f"{name} has values that are too large for {str(wanted).removeprefix('torch.')}.",
                fix="Choose bfloat16 or float32.",
            )
        before, after = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, wanted))
        change = f"Converted {before} tensors to {after}."
        if change not in changes:
            changes.append(change)
    return cast
