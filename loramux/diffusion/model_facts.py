"""What the folder of an image model says about drawing with it: sizes, defaults, known words."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from loramux.config.images import parse_size
from loramux.errors import InvalidRequest, UnsupportedModel

FACTS_NAME = "loramux.json"
"""The file beside model_index.json."""
MAX_SIZE, MAX_LENGTH = 8192, 4096
_FIELDS = ("size", "sizes", "max_sequence_length", "objects", "words")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts that no configuration of diffusers has; what is empty or None is not limited."""

    size: int | None = None
    """The side of an image whose request names no size."""
    sizes: tuple[tuple[int, int], ...] = ()
    """All (width, height) that the model draws."""
    max_sequence_length: int | None = None
    """The length to which prompts are padded."""
    objects: tuple[str, ...] = ()
    """All nouns that the model has learnt."""
    words: tuple[str, ...] = ()
    """The other words that it has learnt."""

    def check_size(self, width: int, height: int) -> None:
        """Raise InvalidRequest for a size that the model does not draw."""
        if self.sizes and (width, height) not in self.sizes:
            served = ", ".join(f"{wide}x{high}" for wide, high in self.sizes)
            raise InvalidRequest(
                f"This model draws {served}, got {width}x{height}. Leave the size out for "
                "the model's own.",
                param="size",
            )

    def warnings(self, prompt: str) -> tuple[str, ...]:
        """Return what the model cannot know of a prompt."""
        if not self.objects:
            return ()
        said = list(dict.fromkeys(_WORD.findall(prompt.lower())))
        unknown = [word for word in said if word not in (*self.objects, *self.words)]
        found = []
        if not any(word in self.objects for word in said):
            known = ", ".join(self.objects)
            found.append(f"The prompt names no object that this model can draw. It knows: {known}.")
        if unknown:
            listed = ", ".join(unknown[:_MAX_NAMED])
            found.append(f"This model has not learnt these words of the prompt: {listed}.")
        return tuple(found)


_MAX_NAMED = 12


def read_facts(folder: Path) -> ModelFacts:
    """Return the facts of a folder; raise UnsupportedModel for a file that has other fields."""
    file = folder / FACTS_NAME
    if not file.exists():
        return ModelFacts()
    try:
        given = json.loads(file.read_bytes())
        names = set(given.keys())
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedModel(f"{file} cannot be read: {error!r}") from error
    if not names or not names <= set(_FIELDS):
        raise UnsupportedModel(f"{file} must have {' or '.join(_FIELDS)}, got {sorted(names)}.")
    try:
        facts = ModelFacts(
            size=_number(given, "size", MAX_SIZE),
            sizes=tuple(parse_size(text) for text in _texts(given, "sizes")),
            max_sequence_length=_number(given, "max_sequence_length", MAX_LENGTH),
            objects=_texts(given, "objects"),
            words=_texts(given, "words"),
        )
        if facts.sizes and (facts.size, facts.size) not in facts.sizes:
            raise InvalidRequest("size must be the side of one of sizes.")
    except InvalidRequest as error:
        raise UnsupportedModel(f"{file}: {error}") from error
    return facts


def _number(given: dict[str, Any], name: str, most: int) -> int | None:
    value = given.get(name)
    if name in given and (type(value) is not int or not 0 < value <= most):
        raise InvalidRequest(f"{name} must be 1 to {most}, got {value!r}.")
    return cast("int | None", value)


def _texts(given: dict[str, Any], name: str) -> tuple[str, ...]:
    value = given.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise InvalidRequest(f"{name} must be a list of texts, got {value!r}.")
    return tuple(value)
