"""Compare images of every family on a GPU with those of a CPU, and mixed batches with one by one.

    python -m tests.gpu.images_check

The models are tiny and random. In float32 without TF32 the GPU draws what the CPU draws; in
bfloat16 the figures say how far a mixed batch is from each request alone. It needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import Section, Table, parse_arguments, start_report
from loramux.diffusion.engine import ImageEngine
from loramux.types.image import ImageRequest
from tests.image_factory import (
    ATTENTION,
    CONVOLUTIONS,
    EMBEDDERS,
    FEED_FORWARD,
    dora_tensors,
    draw_all,
    make_adapter,
    make_pipeline,
    request_for,
    with_parts,
)

FAMILIES = ("flux", "sdxl", "sd3", "qwen_image", "z_image", "flux2", "wan")
STEPS = 6
LIMIT = 1e-3
"""Largest difference of a pixel in float32."""


def requests_of(name: str) -> list[ImageRequest]:
    rows = [
        request_for(name, "base", steps=STEPS),
        request_for(name, "single", steps=STEPS, selection=(("a", 1.0),)),
        request_for(name, "sum", steps=STEPS, selection=(("a", 0.5), ("b", -0.6))),
        # A larger weight lets a difference of one bit grow until it can be seen.
        request_for(name, "wide", steps=STEPS, selection=(("c", 0.2),)),
    ]
    return [msgspec.structs.replace(row, seed=seed) for seed, row in enumerate(rows)]


def engine_of(name: str, device: str, dtype: torch.dtype) -> ImageEngine:
    pipe: Any = make_pipeline(name)
    adapters = [
        make_adapter(pipe, "a", (*ATTENTION, *EMBEDDERS), rank=4),
        make_adapter(pipe, "b", (*FEED_FORWARD, "to_q"), rank=3),
        make_adapter(pipe, "c", (*ATTENTION, *FEED_FORWARD), rank=70),
        make_adapter(pipe, "convolutions", CONVOLUTIONS, rank=4) if name == "sdxl" else None,
    ]
    adapters += with_parts(pipe)
    engine = ImageEngine(pipe.to(device, dtype))
    for adapter in adapters:
        if adapter is not None:
            engine.add_adapter(adapter)
    return engine


def draw_dora(engine: ImageEngine, file: Path, requests: list[ImageRequest]) -> dict[str, Tensor]:
    """Draws with an adapter whose file is read beside the weights on the device."""
    cid = engine.register_adapter(file).cid
    rows = [
        msgspec.structs.replace(
            requests[0], request_id=f"dora {weight}", selection=((cid, weight),)
        )
        for weight in (1.0, -0.5)
    ]
    return draw_all(engine, [*requests, *rows])


BIASES = ("biased", "alone")
PARTS = (*BIASES, "factors")


def draw_parts(
    engine: ImageEngine, requests: list[ImageRequest], cids: Sequence[str]
) -> dict[str, Tensor]:
    """Draws with biases and factors; the steps are enough for a graph to be captured."""
    rows = [
        msgspec.structs.replace(requests[0], request_id=cid, selection=((cid, 0.7),))
        for cid in cids
    ]
    return draw_all(engine, [*requests[:2], *rows])


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def check_family(name: str) -> dict[str, float | str | int]:
    requests = requests_of(name)
    plain, precise = engine_of(name, "cpu", torch.float32), engine_of(name, "cuda", torch.float32)
    expected = draw_all(plain, requests)
    far = furthest(draw_all(precise, requests), expected)
    # Again, now that graphs exist.
    far = max(far, furthest(draw_all(precise, requests), expected))
    if name == "sdxl":
        # Convolutions are added without the kernels, and forwards with them run without graphs.
        others = [
            requests[0],
            request_for(name, "kernel", steps=STEPS, selection=(("convolutions", 1.0), ("a", 0.5))),
        ]
        far = max(far, furthest(draw_all(precise, others), draw_all(plain, others)))
    # Biases are added by the kernels, in graphs; Kronecker factors run without graphs.
    parts = furthest(draw_parts(plain, requests, PARTS), draw_parts(precise, requests, PARTS))
    replays, with_biases = precise.num_replays, draw_parts(plain, requests, BIASES)
    parts = max(parts, furthest(draw_parts(precise, requests, BIASES), with_biases))
    is_replayed = precise.num_replays > replays
    with TemporaryDirectory() as folder:
        file, pipe = Path(folder) / "dora.safetensors", make_pipeline(name)
        made = make_adapter(pipe, "dora", (*ATTENTION, *FEED_FORWARD), rank=4)
        save_file(dora_tensors(pipe, made), file)
        with_dora = draw_dora(plain, file, requests)
        dora = furthest(draw_dora(precise, file, requests), with_dora)
    half = engine_of(name, "cuda", torch.bfloat16)
    together = draw_all(half, requests)
    alone = {key: value for r in requests for key, value in draw_all(half, [r]).items()}
    return {
        "family": name,
        "float32, GPU - CPU": far,
        "the same with DoRA": dora,
        "the same with biases and LoKr": parts,
        "graphs with biases": "yes" if is_replayed else "no",
        "bfloat16, mixed - alone": furthest(together, alone),
        "graphs": "yes" if precise.num_replays else "no",
        "has graphs": "yes" if precise.family.has_graphs else "no",
    }


def is_right(row: dict[str, float | str | int]) -> bool:
    names = ("float32, GPU - CPU", "the same with DoRA", "the same with biases and LoKr")
    is_close = all(float(row[name]) < LIMIT for name in names)
    return is_close and row["graphs"] == row["graphs with biases"] == row["has graphs"]


def main() -> None:
    arguments = parse_arguments(argparse.ArgumentParser(description=__doc__))
    if not torch.cuda.is_available():
        raise SystemExit("Images are compared on an NVIDIA GPU, and there is none.")
    torch.backends.cudnn.allow_tf32 = False
    out = start_report("images-check", arguments, describe_machine("all", "cuda"))
    rows: Table = []
    wrong = []
    for name in FAMILIES:
        row = check_family(name)
        rows.append(dict(row))
        if not is_right(row):
            wrong.append(name)
    out.add(Section(title="Largest difference of a pixel in [0, 1]", rows=rows))
    out.finish()
    if wrong:
        raise SystemExit(f"beyond the limit, or without graphs: {wrong}")


if __name__ == "__main__":
    main()
