from __future__ import annotations

import pytest

from loramux.types.hub_id import HubId, parse_hub_id

FORMS = {
    "org/name": HubId("org/name"),
    "hf:org/name": HubId("org/name"),
    "org/name@v1.0": HubId("org/name", "v1.0"),
    "org/name@refs/pr/3": HubId("org/name", "refs/pr/3"),
    "org/name:a-Q4_0.gguf": HubId("org/name", "main", "a-Q4_0.gguf"),
    "org/name@v1:sub/a.gguf": HubId("org/name", "v1", "sub/a.gguf"),
    "hf:org/name:a.gguf@v1": HubId("org/name", "v1", "a.gguf"),
}
PATHS = [
    *("name", "./name", "../org/name", "/org/name", "~/models/name", "a/b/c", "org/na--me"),
    *("org/name.gguf", "org/config.json", "org/name:", "org/name:weights.bin"),
    *("org/name:../a.gguf", "org/name@", "org/name@v1:a.gguf@v2"),
]


@pytest.mark.parametrize("text", FORMS)
def test_forms_of_the_hub(text: str) -> None:
    assert parse_hub_id(text) == FORMS[text]


@pytest.mark.parametrize("text", PATHS)
def test_other_texts_are_paths(text: str) -> None:
    assert parse_hub_id(text) is None


def test_the_text_leaves_the_default_revision_out() -> None:
    for text in ("org/name", "org/name@v1", "org/name@v1:a.gguf"):
        assert str(parse_hub_id(text)) == text


def test_a_commit_is_known_by_its_form() -> None:
    assert HubId("org/name", "a" * 40).is_commit
    assert not HubId("org/name", "main").is_commit
