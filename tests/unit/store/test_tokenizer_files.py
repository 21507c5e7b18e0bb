"""The tokenizer files of adapters in the store, its views, copies and tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.errors import AdapterRefused
from loramux.store.store import ContentStore
from tests.store_factory import FolderTier, write_tiny

TEMPLATE, VOCABULARY = "chat_template.jinja", "tokenizer.json"


def write_with_template(folder: Path, template: str) -> Path:
    write_tiny(folder)
    (folder / TEMPLATE).write_text(template)
    (folder / VOCABULARY).write_text("{}")
    (folder / "vocab.json").write_text("not one of the files that are read")
    return folder


def test_they_are_kept_and_given_back(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "store")
    folder = write_with_template(tmp_path / "a", "hello")
    cid = store.put_folder(folder)
    for copy in (store.materialize(cid), store.copy_out(cid, tmp_path / "copy")):
        assert (copy / TEMPLATE).read_text() == "hello"
        assert sorted(path.name for path in copy.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
            TEMPLATE,
            VOCABULARY,
        ]
    assert store.put_folder(tmp_path / "copy") == cid
    assert store.verify().is_sound


def test_another_template_is_another_adapter_with_the_same_weights(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "store")
    first = store.put_folder(write_with_template(tmp_path / "a", "one"))
    second = store.put_folder(write_with_template(tmp_path / "b", "two"))
    plain = store.put_folder(write_tiny(tmp_path / "c"))
    assert len({first, second, plain}) == 3
    assert (store.materialize(first) / TEMPLATE).read_text() == "one"
    assert (store.materialize(second) / TEMPLATE).read_text() == "two"
    assert not (store.materialize(plain) / TEMPLATE).exists()


def test_another_machine_gets_them_from_a_tier(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path / "tier")
    here = ContentStore(tmp_path / "here", tiers=[tier])
    cid = here.put_folder(write_with_template(tmp_path / "a", "hello"))
    there = ContentStore(tmp_path / "there", tiers=[tier])
    assert (there.materialize(cid) / TEMPLATE).read_text() == "hello"


def test_links_outside_and_huge_files_are_refused(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "store")
    folder = write_with_template(tmp_path / "a", "hello")
    with (folder / TEMPLATE).open("wb") as file:
        file.truncate(2**21)
    with pytest.raises(AdapterRefused, match="larger"):
        store.put_folder(folder)
    (folder / TEMPLATE).unlink()
    (folder / TEMPLATE).symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(AdapterRefused, match="outside"):
        store.put_folder(folder)
    assert store.cids() == []
