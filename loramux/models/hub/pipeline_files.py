"""Which files of a folder or a repository are a pipeline of diffusers."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from loramux.errors import UnsupportedModel

PIPELINE_INDEX = "model_index.json"
FACTS_NAME = "loramux.json"
_SMALL = (".json", ".txt", ".model", ".jinja")
_WEIGHTS = re.compile(
    r"(?P<stem>[^.]+?)(?:\.(?P<variant>\w+))?(?:-(?P<shard>\d{5})-of-(?P<count>\d{5}))?"
    r"(?:\.(?P<other>\w+))?\.safetensors"
)
_STEMS = ("model", "diffusion_pytorch_model")


def components_of(index: Path) -> list[str]:
    """Return the names of the components of a pipeline; raise UnsupportedModel."""
    try:
        fields = json.loads(index.read_bytes())
        return [
            name
            for name, value in fields.items()
            if isinstance(value, list) and any(part is not None for part in value)
        ]
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedModel(f"{index.name} cannot be read: {error!r}") from error


def small_files(names: Iterable[str], components: Iterable[str]) -> list[str]:
    """Return the configurations and tokenizers among the files of a repository."""
    known = set(components)
    return [
        name
        for name in names
        if name in (PIPELINE_INDEX, FACTS_NAME)
        or (PurePosixPath(name).parts[0] in known and name.endswith(_SMALL))
    ]


def weights_of(
    names: Iterable[str], components: Iterable[str], variant: str | None
) -> tuple[list[str], str | None]:
    """Return the weights of all components, and the variant to load.

    A component without files of the variant has its plain ones. Without a variant, that of
    components that have no plain files is chosen. Raises UnsupportedModel.
    """
    names = list(names)
    chosen: list[str] = []
    used = variant
    for component in components:
        if f"{component}/config.json" not in names:
            # A tokenizer or a scheduler.
            continue
        found = _by_variant(names, component)
        if variant in found:
            kind = variant
        elif None in found:
            kind = None
        elif variant is None and len(found) == 1:
            (kind,) = found
        else:
            raise _no_weights(component, variant, found)
        used = kind if used is None else used
        chosen += _complete(component, found[kind])
    if variant is not None and not any(_variant_of(name) == variant for name in chosen):
        raise UnsupportedModel(f"No component has weights of the variant {variant!r}.")
    return chosen, used


def _by_variant(names: Iterable[str], component: str) -> dict[str | None, list[str]]:
    found: dict[str | None, list[str]] = defaultdict(list)
    for name in names:
        path = PurePosixPath(name)
        match = _WEIGHTS.fullmatch(path.name)
        if path.parts[:-1] == (component,) and match and match["stem"] in _STEMS:
            found[_variant_of(name)].append(name)
    return dict(found)


def _variant_of(name: str) -> str | None:
    match = _WEIGHTS.fullmatch(PurePosixPath(name).name)
    return None if match is None else match["variant"] or match["other"]


def _complete(component: str, names: list[str]) -> list[str]:
    """Return the files of one variant; raise UnsupportedModel if a shard is missing."""
    for name in names:
        match = _WEIGHTS.fullmatch(PurePosixPath(name).name)
        if match and match["count"] and int(match["count"]) > len(names):
            raise UnsupportedModel(
                f"{component} has {len(names)} of {int(match['count'])} files of its weights."
            )
    return names


def _no_weights(
    component: str, variant: str | None, found: Mapping[str | None, list[str]]
) -> UnsupportedModel:
    if found:
        served = ", ".join(sorted(str(one) for one in found))
        return UnsupportedModel(
            f"{component} has weights of the variants {served}: choose one with --image-variant."
        )
    return UnsupportedModel(
        f"{component} has no safetensors weights; other formats can run code when they are read."
    )


def local_files(folder: Path) -> list[str]:
    """Return the files of a pipeline's folder, as a repository lists them."""
    found = [*folder.glob("*"), *folder.glob("*/*")]
    return [path.relative_to(folder).as_posix() for path in found if path.is_file()]
