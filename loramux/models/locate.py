"""Finds a model on this machine, or brings it here from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from loramux.base.progress import SILENT, ByteSink
from loramux.config.images import ImageConfig
from loramux.errors import InvalidRequest, UnsupportedModel
from loramux.models.default_model import default_model_path
from loramux.types.hub_id import HUB_PREFIX, MODEL_FORMS, parse_hub_id


def locate_model(
    model: str | Path | None, *, sink: ByteSink = SILENT, with_weights: bool = True
) -> Path:
    """Return the folder or the GGUF file of a model.

    `model` is a path, which is used if it exists, or org/name[@revision] or org/name:file.gguf on
    the hub; with `hf:` before it, it is never a path. None is the default model. Without weights,
    only what describes the model's shapes is fetched.
    """
    if model is None:
        return default_model_path()
    path = Path(model).expanduser()
    is_named = str(model).startswith(HUB_PREFIX)
    if isinstance(model, Path) or (path.exists() and not is_named):
        return path
    hub_id = parse_hub_id(model)
    if hub_id is not None:
        # Imported here: a model on this machine does not need the hub's client.
        from loramux.models.hub.fetch import fetch_model

        return fetch_model(hub_id, sink=sink, with_weights=with_weights)
    if is_named:
        raise UnsupportedModel(
            f"{model} does not name a model of the hub: write hf:org/name, hf:org/name@revision or "
            "hf:org/name@revision:file.gguf."
        )
    raise UnsupportedModel(f"{path} does not exist: give {MODEL_FORMS}.")


def located_images(images: ImageConfig, *, sink: ByteSink = SILENT) -> ImageConfig:
    """Return the settings with paths of this machine for the image model and its configuration."""
    model, config, variant = images.image_model, images.image_config, images.image_variant
    if model is None:
        return images
    found = locate_image_model(model, variant=variant, sink=sink)
    if found.is_file() and config is None:
        raise InvalidRequest(
            f"{found.name} is a single file, which has no configuration: name the folder or the "
            "repository that has it with --image-config, such as "
            "stabilityai/stable-diffusion-xl-base-1.0, which is then fetched from the hub.",
            param="image_config",
        )
    if config is not None:
        if not found.is_file():
            raise InvalidRequest(
                f"--image-config is for a model of a single file, and {model} is a folder.",
                param="image_config",
            )
        # Imported here: a folder does not need it.
        from loramux.models.hub.single_file import parts_of

        parts = parts_of(found)
        config = str(locate_image_model(config, variant=variant, parts=parts, sink=sink))
    return replace(images, image_model=str(found), image_config=config)


def locate_image_model(
    model: str | Path,
    *,
    variant: str | None = None,
    parts: Collection[str] = (),
    sink: ByteSink = SILENT,
) -> Path:
    """Return the folder of a pipeline, or the file, of a path or of org/name[@revision].

    `parts`: those that a single file has, so that their weights need not be fetched.
    """
    path = Path(model).expanduser()
    is_named = str(model).startswith(HUB_PREFIX)
    if isinstance(model, Path) or (path.exists() and not is_named):
        return path
    hub_id = parse_hub_id(model)
    if hub_id is not None and hub_id.file is None:
        from loramux.models.hub.images import fetch_pipeline

        return fetch_pipeline(hub_id, variant=variant, parts=parts, sink=sink)
    raise UnsupportedModel(
        f"{model} is no image model: give a folder that diffusers saved, a .safetensors file, or "
        "org/name[@revision] on the Hugging Face hub."
    )
