"""Write a LoRA adapter with random weights for the default model, SmolLM2-135M-Instruct.

It is not trained, but changes the model's answers enough to show which adapter was used.

    python examples/make_adapter.py FOLDER [--seed N] [--rank R]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

NUM_LAYERS = 30
HIDDEN_SIZE = 576
OUT_FEATURES = {"q_proj": 576, "v_proj": 192}
STRENGTH = 0.3
"""Strong enough to change a greedy answer, weak enough to keep it a sentence."""


def make_adapter(folder: str | Path, *, seed: int = 0, rank: int = 8) -> Path:
    """Write a PEFT folder with adapter_config.json and adapter_model.safetensors; return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for projection, out_features in OUT_FEATURES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            a = random.normal(0, HIDDEN_SIZE**-0.5, (rank, HIDDEN_SIZE))
            b = random.normal(0, STRENGTH * rank**-0.5, (out_features, rank))
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(OUT_FEATURES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random LoRA for SmolLM2-135M-Instruct.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=8)
    arguments = parser.parse_args()
    print(make_adapter(arguments.folder, seed=arguments.seed, rank=arguments.rank))


if __name__ == "__main__":
    main()
