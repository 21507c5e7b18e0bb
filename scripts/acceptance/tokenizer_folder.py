"""Prints the folder with the default model's tokenizer, for clients that count tokens."""

from __future__ import annotations

from loramux.models.default_model import default_model_path
from loramux.models.gguf_file import converted_folder

if __name__ == "__main__":
    print(converted_folder(default_model_path()))
