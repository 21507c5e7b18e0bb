from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from loramux.errors import SourceForbidden, SourceNotFound, SourceRefused
from loramux.sources.origins.base import RemoteFile, changed, find_adapter
from loramux.sources.source_id import SourceId, SourceKind

FOLDER = SourceId(kind=SourceKind.HUB, place="acme/pirate")
WHOLE = {"adapter_config.json", "adapter_model.safetensors"}
DIFFUSERS = "pytorch_lora_weights.safetensors"
SINGLE = SourceId(kind=SourceKind.HUB, place="acme/pirate", weights_name="x.safetensors")


class Names:
    """An origin that only finds files."""

    revision = None

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[str] = []

    def find(self, name: str) -> RemoteFile | None:
        self.asked.append(name)
        if name not in self.names:
            return None
        return RemoteFile(path=name, size_bytes=1, validator=None)

    def file_names(self) -> Sequence[str]:
        return self.names

    @contextmanager
    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[Iterator[bytes]]:
        raise AssertionError("only names are asked for")
        yield

    def close(self) -> None:
        pass


def test_local_names_are_fixed_so_that_no_name_of_the_source_is_ever_written() -> None:
    origin = Names("adapter_config.json", "adapter_model.safetensors", "../evil", "/etc/passwd")
    found = find_adapter(FOLDER, origin)
    assert list(found) == ["adapter_config.json", "adapter_model.safetensors"]
    main = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(origin.asked) == set(found) | main


def test_tokenizer_files_come_with_an_adapter_that_has_a_tokenizer() -> None:
    own = ["tokenizer.json", "chat_template.jinja", "special_tokens_map.json", "vocab.json"]
    origin = Names("adapter_config.json", "adapter_model.safetensors", *own)
    assert set(find_adapter(FOLDER, origin)) == {*WHOLE, *own[:3]}
    # Trainers also leave these without a tokenizer.
    origin = Names("adapter_config.json", "adapter_model.safetensors", "generation_config.json")
    assert set(find_adapter(FOLDER, origin)) == WHOLE


def test_a_tokenizer_that_may_not_be_read_is_one_that_is_not_there() -> None:
    class Unlisted(Names):
        def find(self, name: str) -> RemoteFile | None:
            found = super().find(name)
            if found is None:
                raise SourceForbidden("no_access", "The bucket may not be listed.")
            return found

    assert set(find_adapter(FOLDER, Unlisted(*WHOLE))) == WHOLE


def test_a_single_file_takes_the_config_beside_it_when_there_is_one() -> None:
    assert list(find_adapter(SINGLE, Names("x.safetensors"))) == [DIFFUSERS]
    found = find_adapter(SINGLE, Names("x.safetensors", "adapter_config.json"))
    assert found["adapter_model.safetensors"].path == "x.safetensors"
    assert len(found) == 2


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth"])
def test_weights_that_are_a_pickle_only_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(SourceRefused, match=f"{name} is a pickle") as refused:
        find_adapter(FOLDER, Names("adapter_config.json", name))
    assert refused.value.code == "pickle"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(SourceNotFound, match=r"adapter_model\.safetensors"):
        find_adapter(FOLDER, Names("adapter_config.json"))
    with pytest.raises(SourceNotFound, match=r"adapter_config\.json"):
        find_adapter(FOLDER, Names("adapter_model.safetensors"))
    with pytest.raises(SourceNotFound, match=r"x\.safetensors"):
        find_adapter(SINGLE, Names("adapter_model.bin"))


def test_a_change_is_worth_another_try() -> None:
    assert changed("x").is_temporary


def test_a_folder_without_an_adapter_of_peft_may_have_the_file_of_an_image_model() -> None:
    assert list(find_adapter(FOLDER, Names(DIFFUSERS, "other.safetensors"))) == [DIFFUSERS]
    only = Names("ink.safetensors", "README.md", "model.safetensors")
    assert find_adapter(FOLDER, only)[DIFFUSERS].path == "ink.safetensors"


def test_several_files_are_listed_and_none_is_taken() -> None:
    with pytest.raises(SourceRefused, match=r"2 .safetensors files: a.safetensors, b.safetensors"):
        find_adapter(FOLDER, Names("b.safetensors", "a.safetensors"))


def test_whole_models_are_not_taken_for_adapters() -> None:
    shards = ("model.safetensors", "model-00001-of-00002.safetensors")
    with pytest.raises(SourceNotFound):
        find_adapter(FOLDER, Names(*shards, "diffusion_pytorch_model.fp16.safetensors"))
