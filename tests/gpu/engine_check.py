"""Compare the tokens and logits of a whole engine with those of the torch reference.

    python -m tests.gpu.engine_check [--parts tokens,logits,large] [--model PATH]

tokens   greedy tokens of a small model in float32
logits   logits of the small model in float32 and bfloat16
large    logits of a model with the shapes of Llama-3.1-8B
--model  logits of trained weights: SmolLM2-135M-Instruct with the adapters of examples/

Other weights are random, and adapters are PEFT folders. It is meant for an NVIDIA GPU; on a CPU it
checks the kernels of the CPU.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import SHAPES, random_model
from benchmarks.lib.report import Section, Table, names, parse_arguments, start_report
from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.engine import Engine
from loramux.engine.tokenizer import Tokenizer
from loramux.models.architectures import base_info
from loramux.models.loader import LoadedModel
from loramux.runner.device_choice import resolve_config
from loramux.runner.gemm import dispatch
from loramux.types.composition import compose
from loramux.types.request import Request, Selection
from loramux.types.sampling import SamplingParams

RANKS = (1, 3, 8, 16, 64)
# The largest sum of adapters, and weights in sums.
MAX_SUM = 4
WEIGHTS = (1.0, 0.5, 0.3, -0.25)
TEXT = (
    "One base model can serve many customers, each with an adapter of its own. The capital of "
    "France is Paris; that of Italy is Rome. A step of the engine computes the next token of every "
    "running request, whatever adapter it names, and the answer does not depend on the others."
)
DIFFER = "requests that differ"
RELATIVE = "relative error"
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Scale:
    shape: dict[str, Any]
    weight_std: float
    adapter_std: float
    pool_bytes: int
    device: str = "cuda"

    def model(self, dtype: torch.dtype) -> LoadedModel:
        return random_model(self.shape, dtype, std=self.weight_std, device=self.device)


SMALL = Scale(SHAPES["small"], 0.08, 0.05, 96 * 2**20)
LARGE = Scale(SHAPES["llama-3.1-8b"], 0.02, 0.01, 8 * 2**30)


def write_adapter(folder: Path, model: LoadedModel, rank: int, scale: Scale) -> Path:
    generator = torch.Generator(scale.device).manual_seed(rank)
    tensors = {}
    for target in base_info(model.config, model.name).targets:
        shapes = {"A": (rank, target.in_features), "B": (target.out_features, rank)}
        for side, shape in shapes.items():
            noise = torch.randn(shape, device=scale.device, generator=generator)
            weight = (noise * scale.adapter_std).bfloat16().cpu()
            tensors[f"base_model.model.{target.path}.lora_{side}.weight"] = weight
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
    """Make requests for the base, one adapter or a sum of up to four, of random lengths."""
    chance = random.Random(0)
    found = []
    for number in range(count):
        prompt = [chance.randrange(1024) for _ in range(chance.randint(1, 300))]
        chosen = chance.sample(list(cids), chance.choice((0, 1, 1, 1, 2, 3, MAX_SUM)))
        weights = [1.0] if len(chosen) == 1 else [chance.choice(WEIGHTS) for _ in chosen]
        selection = compose(zip(chosen, weights, strict=True))
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
    folders: Sequence[Path], dtype: str, *, reference: bool, scale: Scale, **settings: Any
) -> Engine:
    config, _ = resolve_config(
        EngineConfig(
            device=scale.device,
            dtype=dtype,
            device_memory_bytes=scale.pool_bytes,
            reference_kernels=reference,
            max_sequences=32,
            **settings,
        )
    )
    engine = build_engine(scale.model(getattr(torch, dtype)), config)
    for folder in folders:
        engine.register_adapter(folder)
    return engine


def write_adapters(folder: Path, scale: Scale) -> list[Path]:
    model = scale.model(torch.bfloat16)
    return [write_adapter(folder / f"r{rank}", model, rank, scale) for rank in RANKS]


def answer_all(engine: Engine, count: int, name: str) -> dict[str, list[int]]:
    began = time.perf_counter()
    cids = [known.cid for known in engine.catalog.known()]
    answers = run_all(engine, mixed_requests(cids, count))
    counters = engine.memory.costs.device
    print(
        f"{name}: {count} requests in {time.perf_counter() - began:.1f} s, "
        f"{counters.loads} loads, {counters.evictions} evictions so far",
        flush=True,
    )
    return answers


def compare(
    expected: dict[str, list[int]], found: dict[str, list[int]], name: str
) -> dict[str, object]:
    differing = [one for one in expected if expected[one] != found[one]]
    num_tokens = sum(len(tokens) for tokens in expected.values())
    for one in differing[:5]:
        pairs = zip(expected[one], found[one], strict=False)
        first = next(i for i, (a, b) in enumerate(pairs) if a != b)
        print(f"  {name}, {one}: token {first} of {len(expected[one])} differs", flush=True)
    return {"engine": name, "requests": len(expected), "tokens": num_tokens, DIFFER: len(differing)}


@contextmanager
def small_m_in_float32() -> Iterator[None]:
    """Include the small-M GEMM, which is otherwise not used in float32."""
    dispatch.SMALL_M_DTYPES.add(torch.float32)
    try:
        yield
    finally:
        dispatch.SMALL_M_DTYPES.discard(torch.float32)


@small_m_in_float32()
def check_tokens(folders: Sequence[Path], scale: Scale, count: int) -> Section:
    reference = random_engine(folders, "float32", reference=True, scale=scale)
    expected = answer_all(reference, count, "reference")
    # Without the prefix cache the second run computes as much as the first.
    engine = random_engine(folders, "float32", reference=False, scale=scale, prefix_cache=False)
    found = answer_all(engine, count, "engine")
    rows = [compare(expected, found, "all adapters on the device")]
    if scale.device == "cuda":
        with little_memory():
            found = answer_all(engine, count, "little memory")
        rows.append(compare(expected, found, "little memory"))
    churn = random_engine(
        folders, "float32", reference=False, scale=scale, max_active_adapters=MAX_SUM
    )
    found = answer_all(churn, count, f"{MAX_SUM} adapter slots")
    rows.append(compare(expected, found, f"{MAX_SUM} adapters on the device"))
    note = "Greedy tokens in float32, against the torch reference on the same device."
    return Section(title="Tokens", rows=rows, notes=(note,))


@contextmanager
def little_memory(num_bytes: int = 4 * 2**20) -> Iterator[None]:
    """Leave only `num_bytes` of the memory that torch has reserved, and forbid more."""
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
    name: str, engines: Callable[[str, bool], Engine], prompts: Callable[[Engine], Prompts]
) -> Section:
    """Compare the logits of engines(dtype, reference) with those of the first of KINDS."""
    logits = []
    for dtype, reference in KINDS:
        engine = engines(dtype, reference)
        logits.append(torch.cat(engine.prompt_logits(prompts(engine))).float())
        engine.close()
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    rows: Table = []
    for (dtype, reference), other in zip(KINDS[1:], logits[1:], strict=True):
        error = float((other - logits[0]).norm() / logits[0].norm())
        kind = f"{'reference' if reference else 'engine'} in {dtype}"
        rows.append({"logits": kind, RELATIVE: error})
    note = "Relative error: |logits - float32 torch reference| / |float32 torch reference|."
    return Section(title=f"Logits, {name}", rows=rows, notes=(note,))


def check_logits(name: str, folders: Sequence[Path], scale: Scale) -> Section:
    chance = random.Random(1)
    lengths = (1, 17, 64, 150, 200, 40)
    lists = [[chance.randrange(1024) for _ in range(length)] for length in lengths]

    def prompts(engine: Engine) -> Prompts:
        cids = [known.cid for known in engine.catalog.known()]
        mixed = compose(zip(cids[:MAX_SUM], WEIGHTS, strict=True))
        return list(zip(lists, [(), *(((cid, 1.0),) for cid in cids[1:]), mixed], strict=True))

    def engines(dtype: str, reference: bool) -> Engine:
        return random_engine(folders, dtype, reference=reference, scale=scale)

    return compare_logits(name, engines, prompts)


def check_trained(path: Path, folders: Sequence[Path], device: str) -> Section:
    tokens: list[int] = []

    def engines(dtype: str, reference: bool) -> Engine:
        config, _ = resolve_config(
            EngineConfig(
                device=device, dtype=dtype, device_memory_bytes=2**30, reference_kernels=reference
            )
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

    return compare_logits("trained weights of SmolLM2-135M", engines, prompts)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = ("tokens", "logits", "large", "none")
    parser.add_argument("--parts", type=names(parts), default=["tokens", "logits"])
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct, GGUF or folder")
    parser.add_argument("--requests", type=int, default=200, help="requests of the part tokens")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    return parser


def main() -> None:
    arguments = parse_arguments(make_parser())
    device = arguments.device
    out = start_report("check", arguments, describe_machine("float32, bfloat16", device))
    if arguments.model is not None:
        examples = sorted(Path("examples/adapters").glob("*/"))
        out.add(check_trained(arguments.model, examples, device))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scale = replace(SMALL, device=device)
        small = write_adapters(folder / "small", scale)
        if "logits" in arguments.parts:
            out.add(check_logits("small random model", small, scale))
        if "large" in arguments.parts:
            scale = replace(LARGE, device=device)
            large = write_adapters(folder / "large", scale)
            out.add(check_logits("random weights of Llama-3.1-8B's shapes", large, scale))
        if "tokens" in arguments.parts:
            out.add(check_tokens(small, replace(SMALL, device=device), arguments.requests))
    out.finish()


if __name__ == "__main__":
    main()
