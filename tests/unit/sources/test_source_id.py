from __future__ import annotations

import pytest

from loramux.errors import SourceRefused
from loramux.sources.source_id import SourceId, SourceKind, split_path, split_weights

HUB = SourceId(kind=SourceKind.HUB, place="acme/pirate", revision="v1", folder=("a", "b"))


@pytest.mark.parametrize(
    "path",
    ["a/../b", "..", ".", "a//b", "//a", "a/./b", "a\0b", "a\nb", "a\\b", "a\u202eb", "\ud800"]
    + ["\u200b", "a/" + "x" * 256, "\ue000", "a/ /..", "/"],
)
def test_paths_that_could_lead_elsewhere_or_look_like_others_are_refused(path: str) -> None:
    with pytest.raises(SourceRefused) as refused:
        split_path(path, what="The path")
    assert refused.value.code == "bad_form"
    str(refused.value).encode()


@pytest.mark.parametrize(
    ("path", "segments"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a/b/", ("a", "b")),
        ("prénom/名前 1", ("prénom", "名前 1")),
        ("...", ("...",)),
    ],
)
def test_plain_names_of_any_language_pass(path: str, segments: tuple[str, ...]) -> None:
    assert split_path(path, what="The path") == segments


def test_a_path_ending_in_safetensors_is_a_single_file() -> None:
    assert split_weights(("a", "b.safetensors")) == (("a",), "b.safetensors")
    assert split_weights(("a", "b")) == (("a", "b"), None)
    assert split_weights((".safetensors",)) == ((".safetensors",), None)


@pytest.mark.parametrize(
    ("name", "code"),
    [("x.bin", "pickle"), ("x.PT", "pickle"), ("x.zip", "archive"), ("x.tar.gz", "archive")],
)
def test_pickles_and_archives_are_refused_by_name(name: str, code: str) -> None:
    with pytest.raises(SourceRefused) as refused:
        split_weights(("a", name))
    assert refused.value.code == code


def test_the_slug_is_a_safe_folder_name_of_one_source() -> None:
    other = SourceId(kind=SourceKind.HUB, place="acme/pirate", revision="v2")
    assert HUB.slug.isalnum()
    assert HUB.slug != other.slug


def test_the_text_has_every_part() -> None:
    assert str(HUB) == "hf:acme/pirate@v1:a/b"
    assert HUB.path_of("c") == "a/b/c"
    bucket = SourceId(kind=SourceKind.GCS, place="mine", weights_name="w.safetensors")
    assert str(bucket) == "gs://mine/w.safetensors"
    web = SourceId(kind=SourceKind.HTTP, place="https://host:1", folder=("a b",))
    assert str(web) == "https://host:1/a%20b"
