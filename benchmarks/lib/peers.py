"""transformers and PEFT on the same work as the engine, measured in the same run."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.random_weights import llama_settings
from benchmarks.lib.traffic import Watch, finish, make_request
from loramux import LLM
from loramux.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateWork:
    """A static batch of random prompts of one length."""

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
    """Return the output tokens per second of `generate` on one static batch."""
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
    # Synchronize with the device.
    output[0, -1].item()
    return output


def time_engine(engine: Engine, work: GenerateWork) -> float:
    """Return the engine's output tokens per second on the same requests."""
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


class Peers:
    """transformers and PEFT with the weights and dtype of an engine on a CPU."""

    def __init__(self, llm: LLM, num_output: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            llm.model_folder, dtype=llm.engine.executor.dtype
        ).eval()
        # Equivalent to ignore_eos: the end token neither ends an answer nor is it forbidden.
        self._model.generation_config.eos_token_id = None
        self._peft: Any = None
        self._num_output = num_output

    def base(self, prompts: list[list[int]]) -> list[list[int]]:
        """Generate from all prompts in one static batch."""
        return self._generate(prompts)

    def load(self, folders: list[Path]) -> None:
        from peft import PeftModel

        for folder in folders:
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(
                    self._model, folder, adapter_name=folder.name
                )
            elif folder.name not in self._peft.peft_config:
                self._peft.load_adapter(folder, adapter_name=folder.name)

    def sequential(self, prompts: list[list[int]], folders: list[Path]) -> list[list[int]]:
        """Generate adapter by adapter, with the requests of each in one static batch."""
        assert self._peft is not None
        outputs: dict[int, list[int]] = {}
        for number, folder in enumerate(folders):
            self._peft.set_adapter(folder.name)
            indices = list(range(number, len(prompts), len(folders)))
            outputs |= dict(
                zip(indices, self._generate([prompts[i] for i in indices]), strict=True)
            )
        return [outputs[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def gap(self, prompt: list[int], ours: list[int], theirs: list[int], folder: Path) -> float:
        """Return the float64 logit gap of the first tokens in which two answers differ."""
        assert self._peft is not None
        self._peft.set_adapter(folder.name)
        index = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        self._peft.double()
        logits = self._peft(input_ids=torch.tensor([prompt + theirs[:index]])).logits[0, -1]
        self._peft.float()
        return float(logits[theirs[index]] - logits[ours[index]])

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        model = self._peft or self._model
        tokens = torch.tensor(prompts)
        output = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=self._num_output,
            do_sample=False,
            pad_token_id=0,
        )
        return output[:, tokens.shape[1] :].tolist()
