"""Train the demo adapters with PEFT on the default model, SmolLM2-135M-Instruct.

    python examples/train_adapters.py [json] [shout] [pirate] [sentiment] [--device cuda]

The data comes from demo_tasks/ and the seeds are fixed, so one machine reproduces its adapters.
Each takes seconds on a GPU and some minutes on a CPU. It requires peft.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from demo_tasks.catalog import demo_tasks
from demo_tasks.task import Example, Task
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from loramux.models.default_model import DEFAULT_MODEL_NAME, default_model_path
from loramux.models.gguf_file import converted_folder

OUTPUT = Path(__file__).parent / "adapters"
BATCH_SIZE = 12
WARMUP_STEPS = 5
MAX_GRADIENT_NORM = 1.0
NO_TARGET = -100


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """The tokens after the prefix that all conversations share."""

    token_ids: list[int]
    num_prompt_tokens: int


def main() -> None:
    tasks = demo_tasks()
    parser = argparse.ArgumentParser(description="Train the demo adapters.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(tasks)} (default: all)"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(tasks):
        parser.error(f"unknown demo adapter: {', '.join(sorted(unknown))}")
    for name in arguments.names or tasks:
        started = time.monotonic()
        adapter = train(tasks[name], torch.device(arguments.device))
        size = save(adapter, arguments.output / name, tasks[name])
        print(f"{name}: {size / 1e6:.2f} MB, {time.monotonic() - started:.0f} s", flush=True)


def train(task: Task, device: torch.device) -> PeftModel:
    torch.manual_seed(task.seed)
    folder = converted_folder(default_model_path())
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **task.lora)).to(device)
    prefix, examples = tokenize(AutoTokenizer.from_pretrained(folder), task.examples)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=task.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, task.num_steps)
    )
    model.train()
    for step, batch in enumerate(batches(examples, task), start=1):
        loss = answer_loss(model, prefix, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"{task.name}: step {step}/{task.num_steps}, loss {loss.item():.3f}", flush=True)
    return model


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Return the factor of a linear warm-up followed by a cosine decay to zero."""
    warm_up = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm_up * (1 + math.cos(math.pi * step / num_steps)) / 2


def tokenize(
    tokenizer: Any, examples: tuple[Example, ...]
) -> tuple[list[int], list[TokenizedExample]]:
    """Return the common prefix of all conversations (the system prompt), and the rest of each."""
    conversations = []
    for example in examples:
        user = {"role": "user", "content": example.prompt}
        prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer_ids = tokenizer.encode(example.answer, add_special_tokens=False)
        conversations.append((prompt_ids, [*answer_ids, tokenizer.eos_token_id]))
    prefix = common_prefix([prompt_ids for prompt_ids, _ in conversations])
    return prefix, [
        TokenizedExample([*prompt_ids[len(prefix) :], *answer_ids], len(prompt_ids) - len(prefix))
        for prompt_ids, answer_ids in conversations
    ]


def common_prefix(sequences: list[list[int]]) -> list[int]:
    first, last = min(sequences), max(sequences)
    length = next(
        (i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(last)),
    )
    return first[:length]


def batches(examples: list[TokenizedExample], task: Task) -> Iterator[list[TokenizedExample]]:
    """Yield a batch per training step; every example is used once before any is repeated."""
    random = Random(task.seed)
    queue: list[TokenizedExample] = []
    for _ in range(task.num_steps):
        if len(queue) < BATCH_SIZE:
            queue += random.sample(examples, len(examples))
        batch, queue = queue[:BATCH_SIZE], queue[BATCH_SIZE:]
        yield batch


def answer_loss(model: PeftModel, prefix: list[int], batch: list[TokenizedExample]) -> Tensor:
    """Return the mean cross entropy of the answers' tokens.

    The prefix is computed once per batch, with gradients, and its KV cache is shared: the loss is
    that of whole conversations for two thirds of the work.
    """
    base: Any = model.get_base_model()
    decoder = base.model
    device = base.device
    cache = decoder(torch.tensor([prefix], device=device), use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(batch))
    length = max(len(example.token_ids) for example in batch)
    token_ids = torch.zeros(len(batch), length, dtype=torch.long)
    targets = torch.full((len(batch), length), NO_TARGET)
    mask = torch.zeros(len(batch), len(prefix) + length, dtype=torch.long)
    for row, example in enumerate(batch):
        end = len(example.token_ids)
        token_ids[row, :end] = torch.tensor(example.token_ids)
        mask[row, : len(prefix) + end] = 1
        start = example.num_prompt_tokens
        targets[row, start - 1 : end - 1] = token_ids[row, start:end]
    token_ids, targets, mask = token_ids.to(device), targets.to(device), mask.to(device)
    hidden = decoder(token_ids, attention_mask=mask, past_key_values=cache).last_hidden_state
    is_answer = targets != NO_TARGET
    logits = base.lm_head(hidden[is_answer])
    return cross_entropy(logits, targets[is_answer])


def save(model: PeftModel, folder: Path, task: Task) -> int:
    """Write a PEFT folder in float16 and without local paths; return the size of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.float16).contiguous()
        for name, tensor in sorted(get_peft_model_state_dict(model).items())
    }
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config.pop("runtime_config", None)
    config |= {
        "base_model_name_or_path": DEFAULT_MODEL_NAME,
        "inference_mode": True,
        "target_modules": sorted(config["target_modules"]),
    }
    text = json.dumps(config, indent=2, sort_keys=True, default=str)
    (folder / "adapter_config.json").write_text(text + "\n")
    (folder / "README.md").write_text(card(task))
    return weights.stat().st_size


def card(task: Task) -> str:
    return f"""\
# {task.name}

A LoRA adapter for {DEFAULT_MODEL_NAME}: {task.effect}.
Made by `examples/train_adapters.py {task.name}`, scored by `examples/evaluate_adapters.py`.
"""


if __name__ == "__main__":
    main()
