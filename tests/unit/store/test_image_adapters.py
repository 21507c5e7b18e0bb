"""Adapters of image models in the store and the registry."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from loramux.adapters.identity import FileDigest, compute_cid
from loramux.adapters.images.files import DIFFUSERS_NAME, make_image_manifest
from loramux.adapters.signature import sign_manifest
from loramux.errors import AdapterNotFound, AdapterRefused, InvalidRequest
from loramux.registry.registry import Registry
from loramux.store.files import hash_file
from loramux.store.library import AdapterLibrary
from loramux.store.manifest import folder_manifest
from loramux.store.store import ContentStore
from tests.store_factory import FolderTier, image_weights, write_image, write_tiny


@pytest.fixture
def library(tmp_path: Path) -> Iterator[AdapterLibrary]:
    with Registry(tmp_path / "registry.db") as registry:
        yield AdapterLibrary(ContentStore(tmp_path / "store"), registry)


def test_a_file_becomes_a_version_of_its_own_kind(library: AdapterLibrary, tmp_path: Path) -> None:
    metadata = {"modelspec.architecture": "flux-1-dev/lora", "modelspec.trigger_phrase": "inked"}
    file = write_image(tmp_path / "ink.safetensors", metadata=metadata)
    pushed = library.push(file, "acme/ink@1.0.0")
    assert pushed.modality == "image"
    assert pushed.cid == compute_cid(make_image_manifest(hash_file(file), None))
    resolved, folder = library.open("acme/ink")
    assert (resolved.modality, resolved.base_model) == ("image", "flux-1-dev/lora")
    assert (folder / DIFFUSERS_NAME).read_bytes() == file.read_bytes()
    assert library.store.metadata(pushed.cid) == metadata
    (version,) = library.registry.show("acme/ink").versions
    assert version.modality == "image"
    (entry,) = library.registry.catalog(tenant=None, limit=9)
    assert entry.modality == "image"


@pytest.mark.parametrize("others", [[], ["b.safetensors"]])
def test_diffusers_name_or_the_only_file_of_a_folder_is_taken(
    library: AdapterLibrary, tmp_path: Path, others: list[str]
) -> None:
    name = DIFFUSERS_NAME if others else "ink.safetensors"
    content = write_image(tmp_path / "folder" / name).read_bytes()
    for other in others:
        write_image(tmp_path / "folder" / other, 7)
    library.push(tmp_path / "folder", "acme/ink@1.0.0")
    library.pull("acme/ink", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [DIFFUSERS_NAME]
    assert (tmp_path / "out" / DIFFUSERS_NAME).read_bytes() == content


def test_several_files_are_refused_by_name(library: AdapterLibrary, tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_image(tmp_path / "folder" / f"{name}.safetensors")
    with pytest.raises(AdapterRefused, match=r"2 \.safetensors files: a\.safetensors, b") as caught:
        library.push(tmp_path / "folder", "acme/ink@1.0.0")
    assert caught.value.code == "ambiguous_file"


def broken(kind: str) -> bytes:
    names = ("transformer.x.lora_A.weight", "transformer.x.lora_B.weight")
    if kind == "bias_tensors":
        return image_weights(0, names=(*names, "transformer.x.lora_A.bias"))
    if kind == "unserved_method":
        return image_weights(0, names=("lora_unet_x.oft_blocks", "lora_unet_x.alpha"))
    if kind == "no_tensors":
        return image_weights(0, names=("transformer.x.weight",))
    return image_weights(0)[:-4] + struct.pack("<f", float("nan"))


@pytest.mark.parametrize("code", ["bias_tensors", "unserved_method", "no_tensors", "not_finite"])
def test_what_no_image_model_could_serve_is_refused(
    library: AdapterLibrary, tmp_path: Path, code: str
) -> None:
    file = tmp_path / "ink.safetensors"
    file.write_bytes(broken(code))
    with pytest.raises(AdapterRefused) as caught:
        library.push(file, "acme/ink@1.0.0")
    assert caught.value.code == code
    assert library.store.cids() == []


def test_a_folder_of_peft_is_for_text_unless_it_is_pushed_for_images(
    library: AdapterLibrary, tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path / "peft")
    assert library.push(folder, "acme/sql@1.0.0").modality == "text"
    weights = image_weights(3)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    pushed = library.push(folder, "acme/ink@1.0.0", modality="image")
    assert pushed.modality == "image"
    view = library.materialize(pushed.cid)
    assert sorted(path.name for path in view.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((folder / "adapter_config.json").read_text())
    digest = hash_file(folder / "adapter_model.safetensors")
    assert pushed.cid == compute_cid(make_image_manifest(digest, config))
    assert library.verify().faults == ()


def test_aliases_gc_tiers_and_damage(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path / "tier")
    with Registry(tmp_path / "registry.db") as registry:
        library = AdapterLibrary(ContentStore(tmp_path / "store", tiers=[tier]), registry)
        first = library.push(write_image(tmp_path / "1.safetensors", 1), "acme/ink@1.0.0").cid
        second = library.push(write_image(tmp_path / "2.safetensors", 2), "acme/ink@1.1.0").cid
        registry.promote("acme/ink", "1.0.0", alias="prod")
        assert library.open("acme/ink@prod")[0].cid == first
        registry.split("acme/ink", {"1.0.0": 1, "1.1.0": 1}, alias="prod")
        found = {library.open("acme/ink", sticky_key=str(key))[0].cid for key in range(40)}
        assert found == {first, second}
        registry.promote("acme/ink", "1.1.0", alias="prod")
        registry.remove("acme/ink@1.0.0")
        assert library.gc(grace_s=0.0).num_adapters == 1
        assert library.store.cids() == [second]
        # The next store gets it from the tier, and checks it.
        other = AdapterLibrary(ContentStore(tmp_path / "other", tiers=[tier]), registry)
        assert (other.materialize(second) / DIFFUSERS_NAME).exists()
        with pytest.raises(AdapterNotFound):
            library.open("acme/ink@1.0.0")


def test_a_signature_covers_the_file(library: AdapterLibrary, tmp_path: Path) -> None:
    file = write_image(tmp_path / "ink.safetensors")
    manifest = folder_manifest(file)
    assert manifest == make_image_manifest(hash_file(file), None)
    assert manifest != make_image_manifest(FileDigest("0" * 64, 1), None)
    signature = sign_manifest(manifest, Ed25519PrivateKey.generate())
    with pytest.raises(AdapterRefused, match="No signing key of the tenant acme"):
        library.push(file, "acme/ink@1.0.0", signatures=(signature,))


def test_recipes_are_sums_of_one_kind(library: AdapterLibrary, tmp_path: Path) -> None:
    from loramux.adapters.recipe import CombinationOptions

    library.push(write_image(tmp_path / "a.safetensors", 1), "acme/ink@1.0.0")
    library.push(write_image(tmp_path / "b.safetensors", 2), "acme/night@1.0.0")
    library.push(write_tiny(tmp_path / "sql"), "acme/sql@1.0.0")
    terms = [("acme/ink@1.0.0", 0.5), ("acme/night@1.0.0", 0.5)]
    pushed = library.push_recipe(terms, "acme/both@1.0.0", CombinationOptions())
    assert pushed.modality == "image"
    assert library.registry.resolve("acme/both").modality == "image"
    with pytest.raises(InvalidRequest, match="parts of one kind"):
        library.push_recipe(
            [terms[0], ("acme/sql@1.0.0", 1.0)], "acme/x@1.0.0", CombinationOptions(), any_base=True
        )
    with pytest.raises(InvalidRequest, match="not combined by ties"):
        library.push_recipe(terms, "acme/y@1.0.0", CombinationOptions(method="ties"))
