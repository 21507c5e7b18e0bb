from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.adapters.catalog import AdapterCatalog, AdapterRules
from loramux.adapters.packed.dense import sites_of
from loramux.adapters.packed.image import AdapterImage, pack_dense
from loramux.adapters.packed.packing import DensePacking
from loramux.adapters.peft.reader import read_adapter
from loramux.errors import AdapterNotFound, AdapterRefused
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
    write_adapter,
)

BASE = tiny_base_info(tiny_llama_config())


def make_catalog(dtype: torch.dtype = torch.float32) -> AdapterCatalog:
    return AdapterCatalog(AdapterRules(base=BASE, packing=DensePacking(sites_of(BASE), dtype)))


def write(folder: Path, seed: int = 0, **config: Any) -> Path:
    return write_adapter(
        folder, lora_config_dict(**config), lora_tensors(tiny_llama_config(), seed=seed)
    )


def test_the_same_bytes_in_two_folders_are_one_adapter(tmp_path: Path) -> None:
    catalog = make_catalog()
    first, second = catalog.register(write(tmp_path / "a")), catalog.register(write(tmp_path / "b"))
    assert first.cid == second.cid
    assert [known.cid for known in catalog.known()] == [first.cid]
    assert first.num_bytes == catalog.read(first.cid).num_bytes


def test_files_are_read_again_only_when_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def counting(folder: Path, *args: Any, **kwargs: Any) -> Any:
        reads.append(folder)
        return read_adapter(folder, *args, **kwargs)

    monkeypatch.setattr("loramux.adapters.catalog.read_adapter", counting)
    catalog = make_catalog()
    first = catalog.register(write(tmp_path / "a"))
    assert catalog.register(tmp_path / "a") is first and len(reads) == 1
    changed = catalog.register(write(tmp_path / "a", seed=1))
    assert changed.cid != first.cid and len(reads) == 2


def test_registration_hands_on_the_image_that_a_later_read_would_give(tmp_path: Path) -> None:
    catalog = make_catalog()
    heard: list[AdapterImage] = []
    catalog.on_image = heard.append
    known = catalog.register(write(tmp_path / "a"))
    catalog.register(tmp_path / "a")
    expected = pack_dense(read_adapter(tmp_path / "a", BASE), sites_of(BASE), torch.float32)
    assert len(heard) == 1 and heard[0].cid == known.cid
    assert torch.equal(heard[0].buffer, expected.buffer)
    assert torch.equal(catalog.read(known.cid).buffer, expected.buffer)


def test_a_folder_that_was_replaced_is_never_served_under_its_old_id(tmp_path: Path) -> None:
    catalog = make_catalog()
    old = catalog.register(write(tmp_path / "a"))
    catalog.register(write(tmp_path / "b", seed=1))
    write(tmp_path / "a", seed=2)
    with pytest.raises(AdapterRefused, match="no longer holds") as caught:
        catalog.read(old.cid)
    assert caught.value.code == "changed_on_disk"
    with pytest.raises(AdapterRefused, match="no longer holds"):
        catalog.verify(old.cid)


def test_forget_frees_all_and_the_adapter_can_come_again(tmp_path: Path) -> None:
    catalog = make_catalog()
    known = catalog.register(write(tmp_path / "a"))
    catalog.forget(known.cid)
    assert catalog.known() == []
    with pytest.raises(AdapterNotFound):
        catalog.read(known.cid)
    catalog.forget(known.cid)
    assert catalog.register(tmp_path / "a").cid == known.cid


def test_a_folder_that_is_not_there_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound, match="holds adapter_config.json"):
        make_catalog().register(tmp_path / "nothing")


def test_weights_that_overflow_the_serving_dtype_are_refused(tmp_path: Path) -> None:
    tensors = {k: v * 3e5 for k, v in lora_tensors(tiny_llama_config()).items()}
    write_adapter(tmp_path / "a", lora_config_dict(), tensors)
    make_catalog().register(tmp_path / "a")
    with pytest.raises(AdapterRefused, match="too large for"):
        make_catalog(dtype=torch.float16).register(tmp_path / "a")


def test_the_scale_is_folded_into_b(tmp_path: Path) -> None:
    plain = read_adapter(write(tmp_path / "a", lora_alpha=4), BASE)
    scaled = read_adapter(write(tmp_path / "b", lora_alpha=12), BASE)
    images = [pack_dense(a, sites_of(BASE), torch.float32) for a in (plain, scaled)]
    place = images[0].layout.places[0, "qkv"]
    a_size = place.in_features * place.total_rank
    first, second = (image.buffer[place.a_offset :][:a_size] for image in images)
    assert torch.equal(first, second)
    b = place.slices[0]
    first, second = (image.buffer[b.offset :][: b.rank * b.out_features] for image in images)
    torch.testing.assert_close(second, 3 * first)
