"""Measure seconds per image: base, different adapters in one batch, and diffusers one by one.

    python -m benchmarks.images [--shapes flux] [--size 512] [--batches 1,4,8] [--steps 8]

Weights are random, with the shapes of FLUX.1-dev (`flux`), SDXL (`sdxl`) or of a toy (`tiny`); text
encoders are small, as prompts are encoded once. Each image of a mixed batch has another adapter.
diffusers draws some of them one after another, with `set_adapters` before each. Rounds alternate
between base and mixed; figures are medians without the first round. `--tolerance` also compares the
pixels of a mixed batch with those of each request alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import Section, Table, numbers, parse_arguments, start_report
from examples.images.make_tiny_model import make_tokenizer
from loramux.diffusion.adapter import ImageAdapter, LowRank
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.planner import PlanLimits
from loramux.types.image import ImageRequest

# Its classes have no types.
library: Any = diffusers
PROMPT = "a red hill"
LENGTH = 512
CLIP_LENGTH = 77
# Of images per second.
_STOCK_IMAGES = 4
MIXED, STOCK = "mixed / base", "mixed / diffusers"


def clip(width: int, kind: type = CLIPTextModel) -> Any:
    config = CLIPTextConfig(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=max(1, width // 64),
        projection_dim=width,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return kind(config)


def vae_of(channels: Sequence[int], latents: int, scale: float, shift: float | None) -> Any:
    return library.AutoencoderKL(
        block_out_channels=tuple(channels),
        layers_per_block=2,
        latent_channels=latents,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        norm_num_groups=min(32, channels[0]),
        scaling_factor=scale,
        shift_factor=shift,
    )


def flux(*, toy: bool) -> Any:
    """Return the shapes of FLUX.1-dev: 11.9 billion parameters in the transformer."""
    pooled, joint = (64, 64) if toy else (768, 4096)
    small: dict[str, Any] = {
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": 2,
        "joint_attention_dim": joint,
        "pooled_projection_dim": pooled,
    }
    net = library.FluxTransformer2DModel(guidance_embeds=True, **(small if toy else {}))
    t5 = T5Config(vocab_size=128, d_model=joint, d_kv=64, d_ff=joint, num_layers=1, num_heads=1)
    return library.FluxPipeline(
        scheduler=library.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        transformer=net,
        vae=vae_of((32,) * 4 if toy else (128, 256, 512, 512), 16, 0.3611, 0.1159),
        text_encoder=clip(pooled),
        tokenizer=make_tokenizer(CLIP_LENGTH),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=make_tokenizer(LENGTH),
    )


def sdxl() -> Any:
    """Return the shapes of SDXL: 2.6 billion parameters in the UNet."""
    net = library.UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    return library.StableDiffusionXLPipeline(
        scheduler=library.EulerDiscreteScheduler(beta_schedule="scaled_linear"),
        unet=net,
        vae=vae_of((128, 256, 512, 512), 4, 0.13025, None),
        text_encoder=clip(768),
        tokenizer=make_tokenizer(CLIP_LENGTH),
        text_encoder_2=clip(1280, CLIPTextModelWithProjection),
        tokenizer_2=make_tokenizer(CLIP_LENGTH),
    )


SHAPES: dict[str, Callable[[], Any]] = {
    "flux": lambda: flux(toy=False),
    "sdxl": sdxl,
    "tiny": lambda: flux(toy=True),
}
LINEARS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.2", "proj_mlp", "proj_out", "ff.net.0.proj")


def make_pipeline(shapes: str, device: str, dtype: torch.dtype) -> Any:
    kept = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            pipe = SHAPES[shapes]()
    finally:
        torch.set_default_dtype(kept)
    # Made again on the CPU, where diffusers keeps the tables of a sampler.
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def make_adapter(engine: ImageEngine, number: int, rank: int) -> ImageAdapter:
    generator = torch.Generator().manual_seed(number)
    modules = {}
    for path, module in engine.net.named_modules():
        if isinstance(module, nn.Linear) and path.endswith(LINEARS):
            out, wide = module.weight.shape
            a = torch.randn(rank, wide, generator=generator) * wide**-0.5
            modules[path] = LowRank(a, torch.randn(out, rank, generator=generator) * 0.05)
    return ImageAdapter(cid=f"adapter-{number}", components={engine.family.denoiser: modules})


def requests_of(args: argparse.Namespace, batch: int, *, mixed: bool) -> list[ImageRequest]:
    return [
        ImageRequest(
            request_id=str(row),
            prompt=PROMPT,
            width=args.size,
            height=args.size,
            steps=args.steps,
            seed=row,
            selection=((f"adapter-{row}", 1.0),) if mixed else (),
        )
        for row in range(batch)
    ]


def draw(engine: ImageEngine, requests: Sequence[ImageRequest]) -> dict[str, Tensor]:
    pixels = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            if event.pixels is not None:
                pixels[event.request_id] = event.pixels
    return pixels


def draw_stock(pipe: Any, args: argparse.Namespace, batch: int) -> None:
    for row in range(batch):
        pipe.set_adapters([f"adapter-{row}"], [1.0])
        generator = torch.Generator().manual_seed(row)
        size = {"height": args.size, "width": args.size}
        pipe(PROMPT, num_inference_steps=args.steps, generator=generator, **size)


def seconds_of(work: Callable[[], object], args: argparse.Namespace) -> float:
    began = time.perf_counter()
    work()
    if args.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(engine: ImageEngine, args: argparse.Namespace) -> Table:
    """Return seconds per image on the base and with another adapter for each image."""
    rows: Table = []
    for batch in args.batches:
        took: dict[bool, list[float]] = {False: [], True: []}
        for number in range(args.rounds + 1):
            for mixed, seconds in took.items():
                requests = requests_of(args, batch, mixed=mixed)
                spent = seconds_of(partial(draw, engine, requests), args)
                if number > 0:
                    seconds.append(spent / batch)
        base, other = took[False], took[True]
        ratio = statistics.median(a / b for a, b in zip(base, other, strict=True))
        rows.append(
            {
                "batch": batch,
                "base s": statistics.median(base),
                "mixed s": statistics.median(other),
                MIXED: ratio,
            }
        )
    return rows


def quiet() -> None:
    """Leaves out what diffusers and PEFT say about each adapter."""
    diffusers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "Already found a `peft_config`")


def compare_stock(pipe: Any, tensors: Sequence[dict[str, Tensor]], rows: Table, args: Any) -> None:
    """Add the seconds per image of diffusers, which switches between images."""
    quiet()
    for number, given in enumerate(tensors):
        pipe.load_lora_weights(dict(given), adapter_name=f"adapter-{number}")
    count = min(len(tensors), _STOCK_IMAGES)
    draw = partial(draw_stock, pipe, args, count)
    spent = statistics.median([seconds_of(draw, args) for _ in range(args.rounds + 1)][1:]) / count
    for row in rows:
        row["diffusers s"] = spent
        row[STOCK] = spent / float(str(row["mixed s"]))


def tensors_of(adapter: ImageAdapter) -> dict[str, Tensor]:
    found = {}
    for component, modules in adapter.components.items():
        for path, pair in modules.items():
            assert isinstance(pair, LowRank)
            found[f"{component}.{path}.lora_A.weight"] = pair.a
            found[f"{component}.{path}.lora_B.weight"] = pair.b
    return found


def tolerance(engine: ImageEngine, args: argparse.Namespace) -> Table:
    """Compare the pixels of a mixed batch with those of each request alone."""
    requests = requests_of(args, max(args.batches), mixed=True)
    together = draw(engine, requests)
    off = [
        (together[one.request_id] - draw(engine, [one])[one.request_id]).abs() for one in requests
    ]
    levels = [float((one * 255).round().gt(0).float().mean()) for one in off]
    return [
        {
            "images": len(off),
            "largest difference": max(float(one.max()) for one in off),
            "8-bit values that differ": max(levels),
        }
    ]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench images", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batches", type=numbers, default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-peers", action="store_true", help="leave out diffusers")
    parser.add_argument("--tolerance", action="store_true")
    return parser


def main() -> None:
    args = parse_arguments(make_parser())
    dtype = getattr(torch, args.dtype)
    out = start_report("images", args, describe_machine(str(dtype), args.device))
    pipe = make_pipeline(args.shapes, args.device, dtype)
    tokens = max(args.batches) * (args.size // 8) ** 2
    engine = ImageEngine(pipe, PlanLimits(max_tokens=tokens))
    adapters = [make_adapter(engine, number, args.rank) for number in range(max(args.batches))]
    for adapter in adapters:
        engine.add_adapter(adapter)
    rows = measure(engine, args)
    if args.tolerance:
        out.add(Section(title="Mixed against alone", rows=tolerance(engine, args)))
    if not args.no_peers:
        for adapter in adapters:
            engine.remove_adapter(adapter.cid)
        compare_stock(pipe, [tensors_of(adapter) for adapter in adapters], rows, args)
    out.add(Section(title=f"{args.shapes}, {args.size} px, {args.steps} steps", rows=rows))
    out.finish()


if __name__ == "__main__":
    main()
