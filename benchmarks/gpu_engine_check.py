"""The whole engine on one GPU: its tokens against the reference's, and how fast it decodes.

    python3 -m benchmarks.gpu_engine_check [--parts tokens,logits,speed] [--batches 1,32,128,256]

Random weights, made on the device; adapters as PEFT folders. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu_timing import print_table
from loramux.config import EngineConfig
from loramux.engine.build import build_engine
from loramux.engine.engine import Engine
from loramux.models.architectures import base_info, parse_config
from loramux.models.decoder import Decoder
from loramux.models.layers import HeadNorm, RMSNorm
from loramux.models.loader import LoadedModel
from loramux.runner.decode_graphs import LoraKind
from loramux.types import Request, SamplingParams, Selection

SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
LARGE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
RANKS = (1, 3, 8, 16, 64)
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROOFLINE_TOKENS_PER_S = {1: 285, 32: 8_000, 128: 23_300, 256: 28_900}


def random_model(
    shape: dict[str, Any], dtype: torch.dtype, *, std: float, seed: int = 0
) -> LoadedModel:
    """The same values for one seed, whatever the dtype, but for their rounding."""
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}
    config = parse_config({"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, **settings})
    decoder = Decoder(config, dtype=dtype, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    for module in decoder.modules():
        is_norm = isinstance(module, RMSNorm | HeadNorm)
        for parameter in module.parameters(recurse=False):
            noise = torch.randn(parameter.shape, device="cuda", generator=generator)
            parameter.data.copy_((noise * 0.1 + 1 if is_norm else noise * std).bfloat16())
    return LoadedModel(
        decoder=decoder.eval(),
        config=config,
        name="random",
        tokenizer_folder=Path(),
        eos_token_ids=(),
        digest=f"random:{seed}",
    )


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


def small_engine(
    folders: Sequence[Path], dtype: str, *, reference: bool, **settings: Any
) -> Engine:
    config = EngineConfig(
        device="cuda",
        dtype=dtype,
        device_memory_bytes=96 * 2**20,
        reference_kernels=reference,
        max_sequences=32,
        **settings,
    )
    model = random_model(SMALL, getattr(torch, dtype), std=0.08)
    engine = build_engine(model, config)
    for folder in folders:
        engine.register_adapter(folder)
    return engine


def small_adapters(folder: Path) -> list[Path]:
    model = random_model(SMALL, torch.float32, std=0.08)
    return [write_adapter(folder / f"r{rank}", model, rank, seed=rank, std=0.05) for rank in RANKS]


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
    reference = small_engine(folders, "float32", reference=True)
    expected = answer_all(reference, count, "reference")
    # Nothing is cached, so that the second time computes as much as the first.
    engine = small_engine(folders, "float32", reference=False, prefix_cache=False)
    compare(expected, answer_all(engine, count, "engine"), "all adapters on the device")
    with little_memory():
        found = answer_all(engine, count, "little memory")
    runner: Any = engine.runner
    compare(expected, found, f"little memory, steps of up to {runner._max_rows} rows")
    churn = small_engine(folders, "float32", reference=False, max_active_adapters=2)
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


def check_logits(folders: Sequence[Path]) -> None:
    chance = random.Random(1)
    prompts = [[chance.randrange(1024) for _ in range(length)] for length in (1, 17, 64, 150, 200)]
    logits = []
    kinds = [("float32", True), ("float32", False), ("bfloat16", True), ("bfloat16", False)]
    for dtype, reference in kinds:
        engine = small_engine(folders, dtype, reference=reference)
        cids = [known.cid for known in engine.catalog.known()]
        selections: list[Selection] = [(), *(((cid, 1.0),) for cid in cids[1:])]
        found = engine.prompt_logits(list(zip(prompts, selections, strict=True)))
        logits.append(torch.cat(found).float())
        engine.close()
    for (dtype, reference), other in zip(kinds[1:], logits[1:], strict=True):
        error = (other - logits[0]).norm() / logits[0].norm()
        name = f"{'reference' if reference else 'engine'} in {dtype}"
        print(f"logits: {name} against the reference in float32: {error:.2e}", flush=True)


def time_decode(
    engine: Engine, batch: int, cids: Sequence[str], *, num_steps: int = 48
) -> tuple[float, float]:
    """Seconds of an engine step, and of the graph alone, at 512 tokens of context."""
    chance = random.Random(batch)
    for number in range(batch):
        prompt = [chance.randrange(1, 128000) for _ in range(480)]
        selection: Selection = ((cids[number % len(cids)], 1.0),) if cids else ()
        engine.add(request(f"b{number}", prompt, selection, 80))
    engine.residency.poll()
    began = time.perf_counter()
    num_events = 0
    while num_events < batch:
        num_events = len(engine.step())
    torch.cuda.synchronize()
    prompt_s = time.perf_counter() - began
    print(f"  batch {batch}, {len(cids)} adapters: {480 * batch / prompt_s:.0f} prompt tok/s")
    began = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    seconds = (time.perf_counter() - began) / num_steps
    runner: Any = engine.runner
    size = next(size for size in runner._graphs._sizes if size >= batch)
    replay = runner._graphs._step(size, LoraKind.TAIL if cids else LoraKind.NONE)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        replay()
    torch.cuda.synchronize()
    device_s = (time.perf_counter() - began) / 10
    for number in range(batch):
        engine.abort(f"b{number}")
    return seconds, device_s


def check_speed(folder: Path, batches: Sequence[int]) -> None:
    began = time.perf_counter()
    model = random_model(LARGE, torch.bfloat16, std=0.02)
    folders = [
        write_adapter(folder / f"large{number}", model, 16, seed=number, std=0.02)
        for number in range(8)
    ]
    print(f"weights and adapters: {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    config = EngineConfig(
        device="cuda", max_batch_tokens=2048, max_model_len=2048, prefix_cache=False
    )
    engine = build_engine(model, config)
    print(
        f"engine with its graphs: {time.perf_counter() - began:.1f} s, "
        f"a pool of {engine.runner.pool_bytes / 2**30:.1f} GiB, "
        f"{torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB free",
        flush=True,
    )
    cids = [engine.register_adapter(path).cid for path in folders]
    rows = []
    for batch in batches:
        base, base_device = time_decode(engine, batch, ())
        lora, lora_device = time_decode(engine, batch, cids)
        rows.append(
            [batch, *(f"{s * 1e3:.2f}" for s in (base, base_device, lora, lora_device))]
            + [f"{batch / base:.0f}", f"{batch / lora:.0f}", f"{base / lora:.3f}"]
            + [f"{batch / base / ROOFLINE_TOKENS_PER_S.get(batch, 1):.1%}"]
        )
        print_table(["batch", "base ms", "graph", "LoRA ms", "graph", "base tok/s", "LoRA tok/s"]
                    + ["ratio", "of roofline"], rows)  # fmt: skip
    counters = engine.memory.tiers.device_counters
    print(
        f"{counters.loads} adapters of {counters.load_bytes / max(1, counters.loads) / 2**20:.0f} "
        f"MiB copied in {counters.load_seconds / max(1, counters.loads) * 1e3:.1f} ms each"
    )
    print(f"free after all: {torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="tokens,logits,speed")
    parser.add_argument("--batches", default="1,32,128,256")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = small_adapters(folder) if {"tokens", "logits"} & set(parts) else []
        if "logits" in parts:
            check_logits(small)
        if "tokens" in parts:
            check_tokens(small)
        if "speed" in parts:
            check_speed(folder, [int(part) for part in arguments.batches.split(",")])


if __name__ == "__main__":
    main()
