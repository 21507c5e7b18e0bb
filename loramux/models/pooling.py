"""Reads how a model makes vectors: from sentence-transformers' modules and from its config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux.errors import UnsupportedModel
from loramux.models.architectures import HeadKind, head_kind, labels_of
from loramux.models.folder import read_json_list, read_json_object
from loramux.types.pooling import Activation, ModelPooling, Pooling

MODULES, POOLING_FOLDER = "modules.json", "1_Pooling"
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
_MODE_KEYS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_START = "Start the server with --pooling last or --pooling mean to get vectors of it"


def read_pooling(folder: Path, config: Mapping[str, Any], asked: str) -> ModelPooling:
    """Return what a model pools; `asked`: auto, or the pooling that replaces the model's own."""
    kind = head_kind(config)
    generates = kind is HeadKind.TOKENS
    if kind is HeadKind.LABELS:
        if asked != "auto":
            raise UnsupportedModel(
                "The model is a sequence classifier, whose head reads the last token: leave out "
                "--pooling."
            )
        return _classifier(config)
    if config.get("is_causal") is False:
        return ModelPooling(
            refusal="is_causal is false in config.json: the model attends in both directions, "
            "which this server does not compute.",
            generates=generates,
        )
    dimensions = _dimensions(config)
    modules = _modules(folder)
    normalize = modules is None or "Normalize" in modules
    if asked != "auto":
        return ModelPooling(
            pooling=Pooling(asked), normalize=normalize, dimensions=dimensions, generates=generates
        )
    unserved = [name for name in modules or () if name not in _SERVED_MODULES]
    if unserved:
        refusal = (
            f"{MODULES} has a module {', '.join(unserved)}, which this server does not compute. "
            f"{_START} without it."
        )
        return ModelPooling(refusal=refusal, generates=generates)
    mode = _mode(folder)
    if mode is None and modules is None and generates:
        return ModelPooling(
            refusal=f"This is not an embedding model: its files configure no pooling. {_START}."
        )
    if mode is not None and mode not in _MODES:
        refusal = (
            f"The model pools by {mode}, which this server does not compute. {_START} instead."
        )
        return ModelPooling(refusal=refusal, generates=generates)
    return ModelPooling(
        pooling=_MODES[mode or "lasttoken"],
        normalize=normalize,
        dimensions=dimensions,
        generates=generates,
    )


def _modules(folder: Path) -> list[str] | None:
    """Return the class names of sentence-transformers' modules in order."""
    file = folder / MODULES
    if not file.is_file():
        return None
    entries = read_json_list(file)
    return [str(entry.get("type", "")).rpartition(".")[2] for entry in entries]


def _mode(folder: Path) -> str | None:
    file = folder / POOLING_FOLDER / "config.json"
    if not file.is_file():
        return None
    settings = read_json_object(file)
    given = settings.get("pooling_mode")
    modes = [given] if isinstance(given, str) else list(given or ())
    modes = modes or [mode for key, mode in _MODE_KEYS.items() if settings.get(key)]
    return "+".join(modes) or None


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    given = config.get("matryoshka_dimensions")
    if given:
        return tuple(int(size) for size in given)
    return () if config.get("is_matryoshka") else None


def _classifier(config: Mapping[str, Any]) -> ModelPooling:
    labels = labels_of(config)
    activation = Activation.SIGMOID if len(labels) == 1 else Activation.SOFTMAX
    problem = config.get("problem_type")
    if problem == "regression" or (problem is None and _is_raw(config)):
        activation = Activation.NONE
    elif problem == "multi_label_classification":
        activation = Activation.SIGMOID
    return ModelPooling(pooling=Pooling.HEAD, labels=labels, activation=activation, generates=False)


def _is_raw(config: Mapping[str, Any]) -> bool:
    """Return whether a cross-encoder's configuration asks for the outputs themselves."""
    settings = config.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, dict) else None
    return isinstance(name, str) and name.rpartition(".")[2] == "Identity"
