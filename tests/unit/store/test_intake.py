from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.store.intake import StoreLimits, stage_folder
from tests.adapter_factory import write_adapter
from tests.store_factory import CONFIG, tiny_weights, write_tiny

LIMITS = StoreLimits(max_file_bytes=2**20, max_adapter_bytes=2**20)
WEIGHTS = "adapter_model.safetensors"


def test_staged_files_are_independent_copies(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", seed=3)
    (tmp_path / "staging").mkdir()
    staged = stage_folder(folder, tmp_path / "staging", LIMITS)
    (folder / WEIGHTS).write_bytes(b"changed")
    assert staged.paths[WEIGHTS].read_bytes() == tiny_weights(3)
    assert staged.base_model == "tiny-llama"
    assert set(staged.paths) == set(staged.record.files)


def link_out(folder: Path) -> None:
    (folder.parent / "secret").write_bytes(tiny_weights(1))
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder.parent / "secret")


def config_link_out(folder: Path) -> None:
    (folder / "adapter_config.json").rename(folder.parent / "secret.json")
    (folder / "adapter_config.json").symlink_to("../secret.json")


def only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))


def oversized_header(folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 10 * 2**30) + b'{"a":')
        file.truncate(2**19)


def a_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def write_weights(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link out of the folder": (link_out, "link_outside"),
    "a config that is a link": (config_link_out, "link_outside"),
    "only a pickle": (only_a_pickle, "pickle"),
    "a pickle by another name": (write_weights(pickle.dumps([1] * 99)), "pickle"),
    "a zip by another name": (write_weights(b"PK\x03\x04" + b"\0" * 99), "pickle"),
    "a header of 10 GB": (oversized_header, "oversized_header"),
    "cut short": (write_weights(tiny_weights(1)[:-1]), "truncated"),
    "empty": (write_weights(b""), "truncated"),
    "a pipe": (a_pipe, "unreadable"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "weights_missing"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "config_missing"),
    "too large": (write_weights(tiny_weights(1, num_values=2**18)), "too_large"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refusals_come_before_the_weights_are_copied(tmp_path: Path, case: str) -> None:
    break_it, code = BROKEN[case]
    folder = write_tiny(tmp_path / "a")
    break_it(folder)
    staging = tmp_path / "staging"
    staging.mkdir()
    with pytest.raises(AdapterRefused) as caught:
        stage_folder(folder, staging, LIMITS)
    assert caught.value.code == code
    assert not list(staging.iterdir())


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound):
        stage_folder(tmp_path / "none", tmp_path, LIMITS)


def test_the_sum_of_the_files_has_a_limit_of_its_own(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    (tmp_path / "staging").mkdir()
    with pytest.raises(AdapterRefused, match="The adapter is larger than 100 bytes"):
        stage_folder(folder, tmp_path / "staging", StoreLimits(max_adapter_bytes=100))


def test_other_files_of_the_folder_are_left_behind(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    (folder / "README.md").write_text("hello")
    (folder / "run.py").write_text("import os")
    (tmp_path / "staging").mkdir()
    staged = stage_folder(folder, tmp_path / "staging", LIMITS)
    assert sorted(staged.record.files) == ["adapter_config.json", WEIGHTS]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "code"),
    [(torch.nan, "not_finite"), (-torch.inf, "not_finite"), (-1e30, "overflow"), (6e4, None)],
)
def test_values_that_overflow_are_refused(
    dtype: torch.dtype, value: float, code: str | None, tmp_path: Path
) -> None:
    values = torch.tensor([0, 1, -1, value], dtype=torch.float64).to(dtype)
    if dtype is torch.float16 and code == "overflow":
        code = "not_finite"
    folder = write_adapter(tmp_path / "a", CONFIG, save({"x": torch.ones(3), "lora_A": values}))
    (tmp_path / "staging").mkdir()
    if code is None:
        stage_folder(folder, tmp_path / "staging", StoreLimits())
        return
    with pytest.raises(AdapterRefused, match="lora_A") as refused:
        stage_folder(folder, tmp_path / "staging", StoreLimits())
    assert refused.value.code == code
