from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.adapters.catalog import AdapterCatalog, VerifiedAdapters
from loramux.adapters.identity import FileDigest
from loramux.adapters.loading import AdapterRules, FolderLoader, LoadedAdapter
from loramux.adapters.packed.packing import DensePacking
from loramux.adapters.peft.reader import read_adapter
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.store.files import find_record
from loramux.store.store import ContentStore
from loramux.types.adapter import InspectedCard
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
    write_adapter,
)
from tests.packing_factory import pack_dense

BASE = tiny_base_info(tiny_llama_config())


def make_catalog(
    dtype: torch.dtype = torch.float32, *, state: Path | None = None, **options: Any
) -> AdapterCatalog:
    rules = AdapterRules(base=BASE, packing=DensePacking(BASE.linears, dtype, 2**14))
    return AdapterCatalog(rules, verified=VerifiedAdapters(state), **options)


def stored_digests(folder: Path) -> Mapping[str, FileDigest] | None:
    record = find_record(folder)
    return None if record is None else record.covered_files


def write(folder: Path, seed: int = 0, **config: Any) -> Path:
    return write_adapter(
        folder, lora_config_dict(**config), lora_tensors(tiny_llama_config(), seed=seed)
    )


def test_the_same_bytes_in_two_folders_are_one_adapter(tmp_path: Path) -> None:
    catalog = make_catalog()
    first, second = (
        catalog.identify(write(tmp_path / "a")).card,
        catalog.identify(write(tmp_path / "b")).card,
    )
    assert first.cid == second.cid
    assert [known.cid for known in catalog.known()] == [first.cid]
    assert first.num_bytes == catalog.read(first.cid).num_bytes


def test_inspection_predicts_the_image_that_identification_packs(
    tmp_path: Path, num_reads: Callable[[], int]
) -> None:
    catalog = make_catalog()
    folder = write(tmp_path / "a")
    inspected = catalog.inspect(folder)
    assert isinstance(inspected, InspectedCard) and num_reads() == 0 and not catalog.known()
    found = catalog.identify(folder)
    expected = pack_dense(read_adapter(folder, BASE), BASE.linears, torch.float32)
    assert found.card == inspected.identified(expected.cid)
    assert found.card.num_bytes == expected.num_bytes
    assert found.card.rank == expected.layout.max_rank
    assert found.loaded is not None
    assert torch.equal(found.loaded.image.buffer, expected.buffer)
    assert torch.equal(catalog.read(found.card.cid).buffer, expected.buffer)


def test_the_cid_of_checked_files_is_known_to_inspection(
    tmp_path: Path, num_reads: Callable[[], int]
) -> None:
    folder = idle_adapter(tmp_path / "a")
    found = make_catalog(state=tmp_path / "state").identify(folder)
    assert found.loaded is not None and num_reads() == 1
    restarted = make_catalog(state=tmp_path / "state")
    assert restarted.inspect(folder) == found.card and restarted.get(found.card.cid) == found.card
    assert restarted.identify(folder).loaded is None and num_reads() == 1
    idle_adapter(folder)
    assert isinstance(restarted.inspect(folder), InspectedCard)


def test_an_adopted_adapter_is_read_and_checked_at_its_load(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    card = make_catalog().identify(folder).card
    catalog = make_catalog()
    assert catalog.adopt(card) == catalog.get(card.cid)
    assert catalog.read(card.cid).cid == card.cid
    write(tmp_path / "a", seed=1)
    with pytest.raises(AdapterRefused) as caught:
        catalog.read(card.cid)
    assert caught.value.code == "changed_on_disk"


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the reads of whole weights."""
    reads: list[Path] = []
    load = FolderLoader.load

    def counting(loader: FolderLoader, folder: Path) -> LoadedAdapter:
        reads.append(folder)
        return load(loader, folder)

    monkeypatch.setattr(FolderLoader, "load", counting)
    return lambda: len(reads)


def test_weights_are_read_again_only_when_the_files_changed(
    tmp_path: Path, num_reads: Callable[[], int]
) -> None:
    catalog = make_catalog()
    first = catalog.identify(write(tmp_path / "a")).card
    assert catalog.identify(tmp_path / "a").card == first and num_reads() == 1
    changed = catalog.identify(write(tmp_path / "a", seed=1)).card
    assert changed.cid != first.cid and num_reads() == 2


def idle_adapter(folder: Path) -> Path:
    """Write an adapter with a module that has no effect, which is a warning."""
    tensors = lora_tensors(tiny_llama_config())
    tensors[min(name for name in tensors if "lora_B" in name)].zero_()
    return write_adapter(folder, lora_config_dict(), tensors)


def test_a_restarted_engine_does_not_read_files_that_were_checked(
    tmp_path: Path, num_reads: Callable[[], int]
) -> None:
    folder = idle_adapter(tmp_path / "a")
    first = make_catalog(state=tmp_path / "state").identify(folder).card
    assert num_reads() == 1 and any("no effect" in warning for warning in first.warnings)
    restarted = make_catalog(state=tmp_path / "state")
    assert restarted.identify(folder).card == first and num_reads() == 1
    idle_adapter(folder)
    assert make_catalog(state=tmp_path / "state").identify(folder).card == first
    assert num_reads() == 2, "files that were written again are not checked again"
    assert restarted.read(first.cid).cid == first.cid and num_reads() == 3


def test_a_damaged_or_missing_file_of_checks_only_costs_a_check(
    tmp_path: Path, num_reads: Callable[[], int]
) -> None:
    folder = write(tmp_path / "a")
    first = make_catalog(state=tmp_path / "state").identify(folder).card
    (path,) = (tmp_path / "state").iterdir()
    path.write_bytes(b"[1, 2\n{}\n" + b"[" * 3000)
    assert make_catalog(state=tmp_path / "state").identify(folder).card == first
    assert num_reads() == 2
    assert make_catalog(state=tmp_path / "state").identify(folder).card == first
    assert num_reads() == 2, "the new entry is not found behind the damaged ones"
    (tmp_path / "file").write_text("")
    assert make_catalog(state=tmp_path / "file" / "x").identify(folder).card == first


def test_a_store_folder_with_checked_content_is_registered_without_a_read(
    tmp_path: Path, num_reads: Callable[[], int]
) -> None:
    folder = write(tmp_path / "a")
    store = ContentStore(tmp_path / "store")
    view = store.materialize(store.put_folder(folder))
    catalog = make_catalog(find_digests=stored_digests)
    first = catalog.identify(folder).card
    known = catalog.identify(view).card
    assert known.cid == first.cid and known.path == str(view) and num_reads() == 1
    assert make_catalog(find_digests=stored_digests).inspect(view) == known and num_reads() == 1
    assert make_catalog(find_digests=stored_digests).identify(view).card.cid == first.cid
    assert num_reads() == 2, "content that was never checked is not read"


def test_a_store_folder_whose_weights_were_replaced_is_refused_at_its_load(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "store")
    view = store.materialize(store.put_folder(write(tmp_path / "a")))
    other = write(tmp_path / "b", seed=1)
    catalog = make_catalog(find_digests=stored_digests)
    catalog.identify(tmp_path / "a")
    weights = view / "adapter_model.safetensors"
    weights.unlink()
    weights.write_bytes((other / weights.name).read_bytes())
    known = catalog.identify(view).card
    with pytest.raises(AdapterRefused, match="no longer holds"):
        catalog.read(known.cid)


def test_a_folder_that_was_replaced_is_never_served_under_its_old_id(tmp_path: Path) -> None:
    catalog = make_catalog()
    old = catalog.identify(write(tmp_path / "a")).card
    catalog.identify(write(tmp_path / "b", seed=1))
    write(tmp_path / "a", seed=2)
    with pytest.raises(AdapterRefused, match="no longer holds") as caught:
        catalog.read(old.cid)
    assert caught.value.code == "changed_on_disk"
    with pytest.raises(AdapterRefused, match="no longer holds"):
        catalog.verify(old.cid)


def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    """The same bytes, but perhaps of a place from which nothing may be read."""
    catalog = make_catalog()
    cid = catalog.identify(write(tmp_path / "a")).card.cid
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    with pytest.raises(AdapterRefused, match="replaced by a link") as refused:
        catalog.read(cid)
    assert refused.value.code == "changed_on_disk"


def test_forget_frees_all_and_the_adapter_can_come_again(tmp_path: Path) -> None:
    catalog = make_catalog()
    known = catalog.identify(write(tmp_path / "a")).card
    catalog.forget(known.cid)
    assert catalog.known() == []
    with pytest.raises(AdapterNotFound):
        catalog.read(known.cid)
    catalog.forget(known.cid)
    assert catalog.identify(tmp_path / "a").card.cid == known.cid


def test_a_folder_that_is_not_there_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound, match="holds adapter_config.json"):
        make_catalog().identify(tmp_path / "nothing")


def test_weights_that_overflow_the_serving_dtype_are_refused(tmp_path: Path) -> None:
    tensors = {k: v * 3e5 for k, v in lora_tensors(tiny_llama_config()).items()}
    write_adapter(tmp_path / "a", lora_config_dict(), tensors)
    make_catalog().identify(tmp_path / "a")
    with pytest.raises(AdapterRefused, match="too large for"):
        make_catalog(dtype=torch.float16).identify(tmp_path / "a")


def test_the_scale_is_folded_into_b(tmp_path: Path) -> None:
    plain = read_adapter(write(tmp_path / "a", lora_alpha=4), BASE)
    scaled = read_adapter(write(tmp_path / "b", lora_alpha=12), BASE)
    images = [pack_dense(a, BASE.linears, torch.float32) for a in (plain, scaled)]
    place = images[0].layout.places[0, "qkv"]
    a_size = place.in_features * place.total_rank
    first, second = (image.buffer[place.a_offset :][:a_size] for image in images)
    assert torch.equal(first, second)
    b = place.slices[0]
    first, second = (image.buffer[b.offset :][: b.rank * b.out_features] for image in images)
    torch.testing.assert_close(second, 3 * first)
