"""The whole engine on one GPU: its tokens and logits against the reference's.

    python3 -m benchmarks.gpu_engine_check [--parts tokens,logits,large] [--model PATH]

tokens   greedy answers in float32, a small model
logits   of the small model, in float32 and bfloat16
large    the same on the shapes of Llama-3.1-8B
--model  the same on trained weights: SmolLM2-135M-Instruct, with the adapters of examples/

Else random weights, made on the device, and adapters as PEFT folders. Needs an NVIDIA GPU. How fast
it is: benchmarks/bench_step.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.random_model import SHAPES, random_model
from loramux.config import EngineConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.engine import Engine
from loramux.engine.tokenizer import Tokenizer
from loramux.models.architectures import base_info
from loramux.models.loader import LoadedModel
from loramux.runner import products
from loramux.types import Request, SamplingParams, Selection

RANKS = (1, 3, 8, 16, 64)
TEXT = (
    "One base model can serve many customers, each with an adapter of its own. The capital of "
    "France is Paris; that of Italy is Rome. A step of the engine computes the next token of every "
    "running request, whatever adapter it names, and the answer does not depend on the others."
)
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Scale:
    shape: dict[str, Any]
    weight_std: float
    adapter_std: float
    pool_bytes: int


SMALL = Scale(SHAPES["small"], 0.08, 0.05, 96 * 2**20)
LARGE = Scale(SHAPES["llama-3.1-8b"], 0.02, 0.01, 8 * 2**30)


def write_adapter(folder: Path, model: LoadedModel, rank: int, *, seed: int, std: float) -> Path:
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors = {}
    for target in base_info(model.config, model.name).targets:
        shapes = {"A": (rank, target.in_features), "B": (target.out_features, rank)}
        for side, shape in shapes.items():
            noise = torch.randn(shape, device="cuda", generator=generator) * std
            tensors[f"base_model.model.{target.path}.lora_{side}.weight"] = noise.bfloat16().cpu()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(NAMES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def request(
    name: str, prompt: Sequence[int], selection: Selection, num_tokens: int, **params: Any
) -> Request:
    settings = {"temperature": 0.0, "ignore_eos": True, **params}
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=num_tokens, **settings),
        selection=selection,
    )


def mixed_requests(cids: Sequence[str], count: int) -> list[Request]:
    """Base and adapters, one or two on a request; lengths and neighbours at random."""
    chance = random.Random(0)
    found = []
    for number in range(count):
        prompt = [chance.randrange(1024) for _ in range(chance.randint(1, 300))]
        chosen = chance.sample(list(cids), chance.choice((0, 1, 1, 1, 2)))
        weights = [1.0] if len(chosen) == 1 else [0.5, 0.75]
        selection = tuple(zip(chosen, weights, strict=False))
        found.append(request(f"r{number}", prompt, selection, chance.randint(1, 48)))
    return found


def run_all(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            if event.token_id is not None:
                answers[event.request_id].append(event.token_id)
    engine.check_integrity()
    return answers


def random_engine(
    folders: Sequence[Path], dtype: str, *, reference: bool, scale: Scale = SMALL, **settings: Any
) -> Engine:
    config = EngineConfig(
        device="cuda",
        dtype=dtype,
        device_memory_bytes=scale.pool_bytes,
        reference_kernels=reference,
        max_sequences=32,
        **settings,
    )
    model = random_model(scale.shape, getattr(torch, dtype), std=scale.weight_std)
    engine = build_engine(model, config)
    for folder in folders:
        engine.register_adapter(folder)
    return engine


def write_adapters(folder: Path, scale: Scale) -> list[Path]:
    model = random_model(scale.shape, torch.bfloat16, std=scale.weight_std)
    return [
        write_adapter(folder / f"r{rank}", model, rank, seed=rank, std=scale.adapter_std)
        for rank in RANKS
    ]


def answer_all(engine: Engine, count: int, name: str) -> dict[str, list[int]]:
    began = time.perf_counter()
    cids = [known.cid for known in engine.catalog.known()]
    answers = run_all(engine, mixed_requests(cids, count))
    counters = engine.memory.tiers.device_counters
    print(
        f"{name}: {count} requests in {time.perf_counter() - began:.1f} s, "
        f"{counters.loads} loads, {counters.evictions} evictions so far",
        flush=True,
    )
    return answers


def compare(expected: dict[str, list[int]], found: dict[str, list[int]], name: str) -> None:
    wrong = [one for one in expected if expected[one] != found[one]]
    num_tokens = sum(len(tokens) for tokens in expected.values())
    print(f"tokens, {name}: {len(wrong)} of {len(expected)} requests differ ({num_tokens} tokens)")
    for one in wrong[:5]:
        pairs = zip(expected[one], found[one], strict=False)
        first = next(i for i, (a, b) in enumerate(pairs) if a != b)
        print(f"  {one}: token {first} of {len(expected[one])}", flush=True)


def check_tokens(folders: Sequence[Path], count: int = 200) -> None:
    # Products of few rows too, which float32 leaves to torch else.
    products.FEW_ROWS_DTYPES.add(torch.float32)
    reference = random_engine(folders, "float32", reference=True)
    expected = answer_all(reference, count, "reference")
    # Nothing is cached, so that the second time computes as much as the first.
    engine = random_engine(folders, "float32", reference=False, prefix_cache=False)
    compare(expected, answer_all(engine, count, "engine"), "all adapters on the device")
    with little_memory():
        found = answer_all(engine, count, "little memory")
    runner: Any = engine.runner
    compare(expected, found, f"little memory, steps of up to {runner._max_rows} rows")
    churn = random_engine(folders, "float32", reference=False, max_active_adapters=2)
    compare(expected, answer_all(churn, count, "two places"), "two adapters on the device")


@contextmanager
def little_memory(num_bytes: int = 4 * 2**20) -> Iterator[None]:
    """All that torch holds is in use but for so much, and it may take no more."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    limit = torch.cuda.memory_reserved() + 64 * 2**20
    torch.cuda.set_per_process_memory_fraction(limit / total)
    taken: list[torch.Tensor] = []
    for size in (2**22, 2**21, 2**20, 2**19):
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    del taken[-(num_bytes // 2**19) :]
    try:
        yield
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


KINDS = [("float32", True), ("float32", False), ("bfloat16", True), ("bfloat16", False)]
Prompts = list[tuple[list[int], Selection]]


def compare_logits(
    engines: Callable[[str, bool], Engine], prompts: Callable[[Engine], Prompts]
) -> None:
    """engines(dtype, reference) one after the other; the first is what the others should be."""
    logits = []
    for dtype, reference in KINDS:
        engine = engines(dtype, reference)
        logits.append(torch.cat(engine.prompt_logits(prompts(engine))).float())
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    for (dtype, reference), other in zip(KINDS[1:], logits[1:], strict=True):
        error = (other - logits[0]).norm() / logits[0].norm()
        name = f"{'reference' if reference else 'engine'} in {dtype}"
        print(f"logits: {name} against the reference in float32: {error:.2e}", flush=True)


def check_logits(folders: Sequence[Path], scale: Scale = SMALL) -> None:
    chance = random.Random(1)
    lists = [[chance.randrange(1024) for _ in range(length)] for length in (1, 17, 64, 150, 200)]

    def prompts(engine: Engine) -> Prompts:
        cids = [known.cid for known in engine.catalog.known()]
        return list(zip(lists, [(), *(((cid, 1.0),) for cid in cids[1:])], strict=True))

    compare_logits(
        lambda dtype, reference: random_engine(folders, dtype, reference=reference, scale=scale),
        prompts,
    )


def check_trained(path: Path, folders: Sequence[Path]) -> None:
    tokens: list[int] = []

    def engines(dtype: str, reference: bool) -> Engine:
        config = EngineConfig(
            device="cuda", dtype=dtype, device_memory_bytes=2**30, reference_kernels=reference
        )
        model = load_base(path, config)
        tokens[:] = Tokenizer(model.tokenizer_folder).encode(TEXT)
        engine = build_engine(model, config)
        for folder in folders:
            engine.register_adapter(folder)
        return engine

    def prompts(engine: Engine) -> Prompts:
        cids = [known.cid for known in engine.catalog.known()]
        selections: list[Selection] = [(), *(((cid, 1.0),) for cid in cids)]
        return [(tokens, selection) for selection in selections]

    compare_logits(engines, prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="tokens,logits")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct, GGUF or folder")
    arguments = parser.parse_args()
    if arguments.model is not None:
        check_trained(arguments.model, sorted(Path("examples/adapters").glob("*/")))
    parts = arguments.parts.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = write_adapters(folder / "small", SMALL)
        if "logits" in parts:
            check_logits(small)
        if "large" in parts:
            check_logits(write_adapters(folder / "large", LARGE), LARGE)
        if "tokens" in parts:
            check_tokens(small)


if __name__ == "__main__":
    main()
