"""Engines over tiny random models, and PEFT as the oracle."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loramux.config.engine import EngineConfig, ResolvedConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.engine import Engine
from loramux.runner.cpu_runner import CpuRunner
from loramux.types.request import Request, Selection
from loramux.types.sampling import SamplingParams
from loramux.types.step import StepPlan, StepResult
from tests.model_factory import save_hf_folder, tiny_transformers_model
from tests.tokenizer_factory import save_byte_level

Answers = dict[str, list[int]]


def make_engine(
    model: Any,
    folder: Path,
    *,
    loads: Executor | None = None,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Engine:
    if not (folder / "config.json").exists():
        save_hf_folder(model, folder)
    config = cpu_config(**{"dtype": "float32", "device_memory_bytes": 8 * 2**20, **settings})
    return build_engine(load_base(folder, config), config, loads=loads, clock=clock)


def cpu_config(**settings: Any) -> ResolvedConfig:
    return EngineConfig(device="cpu", **settings).resolve("cpu", available_bytes=2**32)


def save_model_with_tokenizer(folder: Path, **overrides: Any) -> Any:
    """Save a tiny model with a tokenizer; return the transformers model."""
    model = tiny_transformers_model("llama", vocab_size=512, **overrides)
    save_hf_folder(model, folder)
    save_byte_level(folder)
    return model


def make_prompt(length: int, seed: int, vocab_size: int = 256) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocab_size, (length,), generator=generator).tolist())


def make_request(
    name: str, prompt: tuple[int, ...], selection: Selection = (), **params: Any
) -> Request:
    settings = {"temperature": 0.0, "max_tokens": 8, **params}
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**settings),
        selection=selection,
        seed=settings.get("seed") or 0,
    )


def cpu_runner(engine: Engine) -> CpuRunner:
    assert isinstance(engine.executor, CpuRunner)
    return engine.executor


def run_step(engine: Engine, plan: StepPlan) -> StepResult:
    return engine.executor.launch(plan).result()


def run_all(engine: Engine, requests: list[Request]) -> Answers:
    """Run all requests in one batch, checking integrity after every step."""
    for request in requests:
        engine.add(request)
    answers: Answers = {request.request_id: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            if event.token_id is not None:
                answers[event.request_id].append(event.token_id)
        engine.check_integrity()
    return answers


def peft_logits(model: Any, folder: Path | None, tokens: tuple[int, ...]) -> Tensor:
    """Compute the logits [tokens, vocab] of PEFT with the adapter, or of the base."""
    from peft import PeftModel

    target = model if folder is None else PeftModel.from_pretrained(copy.deepcopy(model), folder)
    with torch.inference_mode():
        return target.eval()(torch.tensor([tokens])).logits[0]
