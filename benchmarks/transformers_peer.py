"""transformers' `generate` on the same shapes: what the engine is compared with in one run."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.random_model import llama_settings
from benchmarks.traffic import Watch, finish, make_request
from loramux.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateWork:
    batch: int
    num_input: int
    num_output: int

    def prompts(self, vocab_size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocab_size, (self.batch, self.num_input), generator=generator)


@torch.inference_mode()
def time_transformers(
    shape: dict[str, Any], work: GenerateWork, *, device: str, dtype: torch.dtype
) -> float:
    """Output tokens a second of one static batch; the model is gone afterwards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {key: v for key, v in llama_settings(shape).items() if key != "model_type"}
    config = LlamaConfig(**settings, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    prompts = work.prompts(shape["vocab_size"]).to(device)
    _generate(model, prompts, 4)
    began = time.perf_counter()
    output = _generate(model, prompts, work.num_output)
    seconds = time.perf_counter() - began
    assert output.shape[1] == work.num_input + work.num_output
    del model, output
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return work.batch * work.num_output / seconds


def _generate(model: Any, prompts: torch.Tensor, num_output: int) -> torch.Tensor:
    output: torch.Tensor = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_output,
        min_new_tokens=num_output,
        do_sample=False,
    )
    # Waits for the device.
    output[0, -1].item()
    return output


def time_engine(engine: Engine, work: GenerateWork) -> float:
    """Output tokens a second of the same requests, all of them there at the start."""
    _answer(engine, work, "warm", num_output=4)
    return _answer(engine, work, "timed", num_output=work.num_output)


def _answer(engine: Engine, work: GenerateWork, name: str, num_output: int) -> float:
    watch = Watch()
    requests = [
        make_request(f"{name}-{number}", prompt, (), num_output)
        for number, prompt in enumerate(work.prompts(engine.vocab_size).tolist())
    ]
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
        watch.add(request, began)
    while watch.open:
        watch.take(engine.step(), time.perf_counter())
    seconds = time.perf_counter() - began
    finish(engine, watch)
    assert watch.run.num_output == work.batch * num_output
    return watch.run.num_output / seconds
