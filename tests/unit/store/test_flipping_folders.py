"""A folder that its owner replaces while it is read: each outcome is an adapter or a refusal.

The folder changes once per run, before the first, the second, ... operation on files.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.store.intake import StoreLimits, stage_folder
from loramux.types.modality import Modality
from tests.adapter_factory import lora_config_dict, lora_tensors, tiny_llama_config, write_adapter
from tests.store_factory import write_image
from tests.unit.adapters.test_catalog import make_catalog

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OPERATIONS = {"stat", "lstat", "open", "scandir", "listdir", "readlink", "fstat", "read", "utime"}


class Flip:
    """Calls `change` before the n-th call of an operation on files."""

    def __init__(self, number: int, change: Callable[[], object]) -> None:
        self.left = number
        self._change = change

    def __call__(self, _frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in OPERATIONS:
            self.left -= 1
            if self.left == 0:
                self._change()


def write_text(folder: Path) -> Path:
    write_adapter(folder, lora_config_dict(), lora_tensors(tiny_llama_config(), seed=1))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_picture(folder: Path) -> Path:
    return write_image(folder / "ink.safetensors").parent


def write_picture_of_peft(folder: Path) -> Path:
    write_image(folder / WEIGHTS)
    (folder / CONFIG).write_text('{"r": 2, "lora_alpha": 2}')
    return folder


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def cut(folder: Path) -> None:
    for path in folder.iterdir():
        os.truncate(path, path.stat().st_size // 2)


def link_to_itself(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
        path.symlink_to(path.name)


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("{}")


def push(folder: Path, modality: Modality | None = None) -> None:
    staging = folder.parent / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    stage_folder(folder, staging, StoreLimits(), modality=modality)


def load(folder: Path) -> None:
    catalog = make_catalog()
    catalog.read(catalog.identify(folder).card.cid)


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "push": (write_text, push),
    "push of an image adapter": (write_picture, push),
    "push of an image adapter of PEFT": (write_picture_of_peft, partial(push, modality="image")),
    "load": (write_text, load),
}


@pytest.mark.parametrize("change", [remove, cut, link_to_itself, become_a_file])
@pytest.mark.parametrize("case", READERS)
def test_a_folder_that_changes_while_it_is_read_is_an_adapter_or_refused(
    tmp_path: Path, case: str, change: Callable[[Path], None]
) -> None:
    write, read = READERS[case]
    original = write(tmp_path / "original")
    refused = 0
    for number in range(1, 1000):
        folder = shutil.copytree(original, tmp_path / str(number) / "adapter")
        flip = Flip(number, partial(change, folder))
        sys.setprofile(flip)
        try:
            read(folder)
        except (AdapterNotFound, AdapterRefused):
            refused += 1
        finally:
            sys.setprofile(None)
        if flip.left > 0:
            break
    assert flip.left > 0 and refused > 0
