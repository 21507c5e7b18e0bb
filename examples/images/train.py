"""Train the demo's image model, and a LoRA adapter for each style, on a CPU or a GPU.

    python examples/images/icons.py FOLDER icons.npz
    python -m examples.images.train icons.npz examples/images [--minutes 28,3]

Writes model/ and adapters/ into the folder. `--minutes`: model, and each adapter. The autoencoder
needs no training, so that the latents of all pictures are computed once. What the folder has
already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from examples.images.autoencoder import fit
from examples.images.icons import BASE, OBJECTS, SIDE
from examples.images.network import TEXT_TOKENS, make_pipeline, make_tokenizer, pack, positions
from examples.images.scenes import ALSO, BACKGROUNDS, Scenes, captions, make_scenes
from loramux.diffusion.model_facts import FACTS_NAME

EMA = 0.995
WARM_UP = 0.03
"""Share of the time."""
LINEARS = (
    r"(transformer_blocks|single_transformer_blocks)\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|"
    r"add_k_proj|add_v_proj|to_add_out)|ff\.net\.0\.proj|ff\.net\.2|ff_context\.net\.0\.proj|"
    r"ff_context\.net\.2|proj_mlp|proj_out|norm1\.linear|norm1_context\.linear|norm\.linear)"
)
RANK = 8
PEFT, KOHYA = "delft", "pixel"
"""Adapters that are written in these formats; the others are in that of diffusers."""


def learn(
    title: str,
    minutes: float,
    loss: Callable[[], Tensor],
    parameters: Iterable[nn.Parameter],
    rate: float,
    average: Iterable[Tensor] = (),
) -> None:
    """Repeat a training step for some minutes; `average` follows the parameters."""
    learnt = [p for p in parameters if p.requires_grad]
    mean = list(average)
    optimizer = torch.optim.AdamW(learnt, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    began, number, seen = time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        decay = (1 + math.cos(math.pi * share)) / 2
        optimizer.param_groups[0]["lr"] = rate * min(1.0, 0.1 + share / WARM_UP) * decay
        optimizer.zero_grad(set_to_none=True)
        found = loss()
        found.backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        if mean:
            torch._foreach_lerp_(mean, learnt, 1 - min(EMA, number / (number + 10)))
        seen += (found.item() - seen) * max(0.01, 1 / (number + 1))
        number += 1
        if number % 50 == 0:
            print(f"  {title}: step {number}, {share:.0%}, loss {seen:.4f}", flush=True)
    print(f"{title}: {number} steps in {minutes:g} minutes, loss {seen:.4f}", flush=True)


class Training:
    def __init__(self, scenes: Scenes, folder: Path, batch: int, device: str) -> None:
        self.scenes = scenes
        self.folder = folder
        self.batch = batch
        self.device = torch.device(device)
        self.ids = positions(SIDE // 16, self.device)
        texts = [text for each in scenes.captions for text in each]
        tokenizer = make_tokenizer(texts)
        self.pipeline: FluxPipeline = make_pipeline(tokenizer).to(device)
        rows = tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
        self.texts = rows.to(device)
        """Token ids of all captions."""
        counts = torch.tensor([len(each) for each in scenes.captions])
        self.first = (counts.cumsum(0) - counts).to(device)
        """First caption of each picture."""
        self.counts = counts.to(device)
        # Half of what is drawn has the white background, which captions do not name.
        plain = torch.tensor([" on a " not in each[0] for each in scenes.captions])
        self.odds = torch.where(plain, 0.5 / plain.sum(), 0.5 / (~plain).sum()).to(device)

    @property
    def learnt(self) -> list[nn.Module]:
        pipeline = self.pipeline
        return [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]

    @torch.no_grad()
    def tokens(self, style: str) -> Tensor:
        """Return the model's tokens of all pictures of a style."""
        vae = self.pipeline.vae
        parts = self.scenes.images[style].to(self.device).split(32)
        latents = torch.cat([vae.encode(part).latents for part in parts])
        return pack(latents * vae.config.scaling_factor)

    def flow_loss(self, tokens: Tensor) -> Tensor:
        """Mean square error of the velocity at a random time of each row."""
        pipeline = self.pipeline
        pick = torch.multinomial(self.odds, self.batch, replacement=True)
        other = (torch.rand(self.batch, device=self.device) * self.counts[pick]).long()
        ids = self.texts[self.first[pick] + other]
        wanted = tokens[pick]
        at = torch.sigmoid(torch.randn(self.batch, device=self.device))
        noise = torch.randn_like(wanted)
        part = at[:, None, None]
        velocity = pipeline.transformer(
            hidden_states=(1 - part) * wanted + part * noise,
            timestep=at,
            encoder_hidden_states=pipeline.text_encoder_2(ids)[0],
            pooled_projections=pipeline.text_encoder(ids).pooler_output,
            img_ids=self.ids,
            txt_ids=torch.zeros(ids.shape[1], 3, device=self.device),
        ).sample
        return functional.mse_loss(velocity, noise - wanted)

    def train_base(self, minutes: float) -> None:
        parameters = [p for part in self.learnt for p in part.parameters()]
        average = [p.detach().clone() for p in parameters]
        tokens = self.tokens(BASE)
        learn("model", minutes, lambda: self.flow_loss(tokens), parameters, 2e-3, average)
        with torch.no_grad():
            torch._foreach_copy_(parameters, average)

    def train_adapter(self, style: str, minutes: float) -> dict[str, Tensor]:
        """Return the adapter's tensors by PEFT's names."""
        transformer = self.pipeline.transformer
        for part in self.learnt:
            part.requires_grad_(False)
        transformer.add_adapter(lora_config(), adapter_name=style)
        tokens = self.tokens(style)
        learn(style, minutes, lambda: self.flow_loss(tokens), transformer.parameters(), 8e-3)
        found = get_peft_model_state_dict(transformer, adapter_name=style)
        tensors = {name: tensor.detach().half().cpu() for name, tensor in found.items()}
        transformer.unload_lora()
        return tensors

    def save(self) -> None:
        """Write the pipeline in half precision."""
        folder = self.folder / "model"
        self.pipeline.to(dtype=torch.float16).save_pretrained(folder)
        self.pipeline.to(dtype=torch.float32)
        (folder / FACTS_NAME).write_text(json.dumps(model_facts()) + "\n")
        # diffusers writes a setting that it does not expect when it reads the file.
        _drop(folder / "vae" / "config.json", "block_out_channels")
        # Where it was read from before.
        _drop(folder / "transformer" / "config.json", "_name_or_path")

    def load(self) -> bool:
        """Read the pipeline where the folder has it."""
        folder = self.folder / "model"
        if not (folder / FACTS_NAME).exists():
            return False
        pipeline = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
        self.pipeline = pipeline.to(self.device)
        return True

    def run(self, model: float, adapter: float) -> None:
        if not self.load():
            fit(self.pipeline.vae, torch.cat(list(self.scenes.images.values())).to(self.device))
            self.train_base(model)
            self.save()
        for style in [style for style in self.scenes.images if style != BASE]:
            file = adapter_file(self.folder / "adapters", style)
            if not file.exists():
                save_adapter(file, style, self.train_adapter(style, adapter))


def lora_config() -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LINEARS)


def adapter_file(folder: Path, style: str) -> Path:
    if style == PEFT:
        return folder / style / "adapter_model.safetensors"
    return folder / f"{style}.safetensors"


def save_adapter(file: Path, style: str, tensors: dict[str, Tensor]) -> None:
    """Write an adapter in one of three formats: that of diffusers, PEFT or kohya."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if style == PEFT:
        lora_config().save_pretrained(file.parent)
        save_file({f"base_model.model.{name}": t for name, t in tensors.items()}, file)
    elif style == KOHYA:
        save_file(kohya(tensors), file)
    else:
        save_file({f"transformer.{name}": t for name, t in tensors.items()}, file)


def model_facts() -> dict[str, Any]:
    """Return what the folder of the model says of its sizes and words."""
    words = {word for colour in BACKGROUNDS for word in captions("", colour)[1].split()}
    return {
        "size": SIDE,
        "sizes": [f"{SIDE}x{SIDE}"],
        "max_sequence_length": TEXT_TOKENS,
        "objects": [*OBJECTS, *ALSO.values()],
        "words": sorted(words),
    }


def kohya(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename to kohya's names; alpha is half the rank, and `up` twice as large."""
    renamed = {}
    for name, tensor in tensors.items():
        path, _, side = name.removesuffix(".weight").rpartition(".lora_")
        layer = f"lora_transformer_{path.replace('.', '_')}"
        if side == "A":
            renamed[f"{layer}.lora_down.weight"] = tensor
            renamed[f"{layer}.alpha"] = torch.tensor(tensor.shape[0] / 2)
        else:
            renamed[f"{layer}.lora_up.weight"] = tensor * 2
    return renamed


def _drop(file: Path, name: str) -> None:
    """Remove an entry of a JSON file, if it is there."""
    entries = json.loads(file.read_text())
    entries.pop(name, None)
    file.write_text(json.dumps(entries, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("icons", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", default="28,3")
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training = Training(make_scenes(options.icons), options.out, options.batch, device)
    model, adapter = map(float, options.minutes.split(","))
    training.run(model, adapter)


if __name__ == "__main__":
    main()
