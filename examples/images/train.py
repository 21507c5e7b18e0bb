"""Train the demo's image model, and a LoRA adapter for each style.

    python examples/images/icons.py FOLDER icons.zip
    python -m examples.images.train icons.zip examples/images/model [--seconds 60,230,18]

The model is a FLUX pipeline that draws emoji of 96 x 96 pixels from words. Every step is one CUDA
graph: scenes are composed, encoded, noised and learnt on the GPU. On a CPU it runs the same steps
without a graph, for tests. `--seconds`: VAE, model, each adapter.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from diffusers import FluxPipeline
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn
from torch.nn import functional

from examples.images.icons import BASE, SIZE, STYLES, load
from examples.images.network import make_pipeline, make_tokenizer, pack, positions
from examples.images.scenes import EFFECTS, Scenes, captions, make_scenes

EMA = 0.998
RANK = 16
LINEARS = (
    r"(transformer_blocks|single_transformer_blocks)\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|"
    r"add_k_proj|add_v_proj|to_add_out)|ff\.net\.0\.proj|ff\.net\.2|ff_context\.net\.0\.proj|"
    r"ff_context\.net\.2|proj_mlp|proj_out|norm1\.linear|norm1_context\.linear|norm\.linear)"
)


class Fit:
    """Repeats a training step for some seconds, as a CUDA graph where there is a GPU."""

    def __init__(
        self,
        loss: Callable[[], Tensor],
        parameters: Iterable[nn.Parameter],
        rate: float,
        average: Iterable[Tensor] = (),
    ) -> None:
        """`average`: tensors that follow the parameters as their moving average."""
        self._loss = loss
        self._parameters = [p for p in parameters if p.requires_grad]
        self._average = list(average)
        self._is_gpu = self._parameters[0].is_cuda
        self._peak = rate
        device = self._parameters[0].device
        self._rate = torch.tensor(0.0, device=device)
        self._seen = torch.zeros((), device=device)
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._rate if self._is_gpu else rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            capturable=self._is_gpu,
        )

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=self._is_gpu, cache_enabled=False):
            loss = self._loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._seen.lerp_(loss.detach().float(), 0.02)
        if self._average:
            torch._foreach_lerp_(self._average, self._parameters, 1 - EMA)

    def _captured(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            print(f"  no CUDA graph, steps run one by one: {error}", flush=True)
            torch.cuda.synchronize()
            return self._step
        return graph.replay

    def run(self, title: str, seconds: float) -> None:
        began = time.monotonic()
        step = self._captured() if self._is_gpu else self._step
        number, ready = 0, time.monotonic()
        while (spent := time.monotonic() - began) < seconds:
            share = spent / seconds
            rate = self._peak * min(1.0, (number + 1) / 200) * (1 + math.cos(math.pi * share)) / 2
            if self._is_gpu:
                self._rate.fill_(rate)
            else:
                self._optimizer.param_groups[0]["lr"] = rate
            step()
            number += 1
            if self._is_gpu and number % 20 == 0:
                torch.cuda.synchronize()
            if number % 500 == 0:
                print(f"  {title}: step {number}, loss {self._seen.item():.4f}", flush=True)
        print(
            f"{title}: {number} steps in {seconds:.0f} s (ready after {ready - began:.1f} s), "
            f"loss {self._seen.item():.4f}",
            flush=True,
        )


class Training:
    def __init__(self, file: Path, batch: int, device: str) -> None:
        names, drawn = load(file)
        self.device = torch.device(device)
        self.batch = batch
        tokenizer = make_tokenizer(captions(names))
        self.pipeline: FluxPipeline = make_pipeline(tokenizer).to(device)
        icons = {style: torch.from_numpy(found) for style, found in drawn.items()}
        self.scenes: Scenes = make_scenes(names, icons, tokenizer, self.device)
        self.ids = positions(SIZE // 8, self.device)
        self.names = names

    def train_vae(self, seconds: float) -> None:
        vae = self.pipeline.vae.train().to(memory_format=torch.channels_last)
        styles = list(STYLES)

        def loss() -> Tensor:
            share = max(1, self.batch // len(styles) // 2)
            images = torch.cat([self.scenes.draw(share, style)[0] for style in styles])
            images = torch.cat([images, *(f(images[:share]) for f in EFFECTS.values())])
            found = vae.encode(images).latent_dist
            made = vae.decode(found.sample()).sample
            edges = sum(
                functional.l1_loss(made.diff(dim=axis), images.diff(dim=axis)) for axis in (2, 3)
            )
            return functional.l1_loss(made, images) + edges + 1e-6 * found.kl().mean()

        Fit(loss, vae.parameters(), 2e-3).run("VAE", seconds)
        vae.eval().requires_grad_(False)
        with torch.no_grad():
            images = self.scenes.draw(self.batch, BASE)[0]
            latents = vae.encode(images).latent_dist.mean
            made = vae.decode(latents).sample.clamp(-1, 1)
        vae.register_to_config(
            scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item()
        )
        error = ((made - images) / 2).square().mean().item()
        print(f"VAE: {-10 * math.log10(error):.1f} dB", flush=True)

    def latents(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        with torch.no_grad():
            found = vae.encode(images).latent_dist.mean
            return pack((found - vae.config.shift_factor) * vae.config.scaling_factor)

    def flow_loss(self, latents: Tensor, ids: Tensor) -> Tensor:
        """Mean square error of the velocity at a random time of each row."""
        pipeline = self.pipeline
        time_ = torch.sigmoid(torch.randn(len(latents), device=self.device))
        noise = torch.randn_like(latents)
        part = time_[:, None, None]
        text = pipeline.text_encoder_2(ids)[0]
        pooled = pipeline.text_encoder(ids).pooler_output
        velocity = pipeline.transformer(
            hidden_states=(1 - part) * latents + part * noise,
            timestep=time_,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            img_ids=self.ids,
            txt_ids=torch.zeros(ids.shape[1], 3, device=self.device),
        ).sample
        return functional.mse_loss(velocity.float(), noise - latents)

    def train_base(self, seconds: float) -> None:
        pipeline = self.pipeline
        parts = (pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2)
        parameters = [p for part in parts for p in part.parameters()]
        average = [p.detach().clone() for p in parameters]

        def loss() -> Tensor:
            with torch.no_grad():
                images, ids = self.scenes.draw(self.batch, BASE)
            return self.flow_loss(self.latents(images), ids)

        Fit(loss, parameters, 1.5e-3, average).run("model", seconds)
        with torch.no_grad():
            for parameter, mean in zip(parameters, average, strict=True):
                parameter.copy_(mean)
        for part in parts:
            part.requires_grad_(False)

    def train_adapter(self, style: str, seconds: float) -> dict[str, Tensor]:
        transformer = self.pipeline.transformer
        transformer.add_adapter(
            LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LINEARS), adapter_name=style
        )
        parameters = [p for p in transformer.parameters() if p.requires_grad]

        def loss() -> Tensor:
            with torch.no_grad():
                if style in EFFECTS:
                    images, ids = self.scenes.draw(self.batch, BASE)
                    images = EFFECTS[style](images)
                else:
                    images, ids = self.scenes.draw(self.batch, style)
            return self.flow_loss(self.latents(images), ids)

        Fit(loss, parameters, 3e-3).run(f"adapter {style}", seconds)
        found = get_peft_model_state_dict(transformer, adapter_name=style)
        tensors = {name: tensor.detach().half().cpu() for name, tensor in found.items()}
        transformer.delete_adapters(style)
        return copy.deepcopy(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("icons", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", default="60,230,18")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--styles", default=",".join([*list(STYLES)[1:], *EFFECTS]))
    options = parser.parse_args()
    vae_s, base_s, adapter_s = map(float, options.seconds.split(","))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        # Their gradient of T5's position bias ends in an error of cuBLAS (torch 2.11).
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    training = Training(options.icons, options.batch, device)
    count = sum(p.numel() for p in training.pipeline.transformer.parameters())
    print(
        f"{len(training.names)} names, {count / 1e6:.2f} M parameters in the transformer",
        flush=True,
    )
    training.train_vae(vae_s)
    training.train_base(base_s)
    options.out.mkdir(parents=True, exist_ok=True)
    saved = copy.deepcopy(training.pipeline.transformer).half()
    training.pipeline.save_pretrained(options.out)
    saved.save_pretrained(options.out / "transformer")
    for part in ("vae", "text_encoder", "text_encoder_2"):
        copy.deepcopy(getattr(training.pipeline, part)).half().save_pretrained(options.out / part)
    (options.out / "names.json").write_text(json.dumps(training.names))
    for style in options.styles.split(","):
        tensors = training.train_adapter(style, adapter_s)
        FluxPipeline.save_lora_weights(
            options.out / "adapters" / style,
            transformer_lora_layers=tensors,
            weight_name=f"{style}.safetensors",
        )


if __name__ == "__main__":
    main()
