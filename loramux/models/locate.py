"""Finds a model on this machine, or brings it here from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from loramux.errors import UnsupportedModel
from loramux.models.default_model import default_model_path
from loramux.progress import SILENT, ByteSink
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
