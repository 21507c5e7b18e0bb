"""Twenty aLoRA adapters over one long context: a real server computes the context once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import make_prompt, save_model_with_tokenizer
from tests.serve_factory import RunningServer, running_server

# PEFT answers twenty prompts of 2,000 tokens.
pytestmark = pytest.mark.slow

NUM_ADAPTERS = 20
NUM_CONTEXT = 2000
BLOCK = 16
INVOCATION = [301, 302]
# Its own invocation, and a question.
PROMPTS = {
    f"intrinsic-{number}": [
        *make_prompt(NUM_CONTEXT, seed=1),
        *INVOCATION,
        *make_prompt(1 + number % 3, seed=number),
    ]
    for number in range(NUM_ADAPTERS)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, str]:
    """Return what PEFT generates with each adapter; the adapters are written beside the model."""
    model = save_model_with_tokenizer(
        folder / "model", num_hidden_layers=2, max_position_embeddings=4096
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    found = {}
    peft: Any = None
    for seed, name in enumerate(PROMPTS):
        make_peft_adapter(folder / name, model, seed=seed, r=2, alora_invocation_tokens=INVOCATION)
    for name, prompt in PROMPTS.items():
        if peft is None:
            peft = PeftModel.from_pretrained(model, folder / name, adapter_name=name).eval()
            peft.generation_config.eos_token_id = None
        else:
            peft.load_adapter(str(folder / name), adapter_name=name)
        peft.set_adapter(name)
        tokens = torch.tensor([prompt])
        made = peft.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=8,
            do_sample=False,
        )
        found[name] = tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True)
    return found


@pytest.fixture(scope="module")
def server(folder: Path, answers: dict[str, str]) -> Iterator[RunningServer]:
    flags = ["--model", str(folder / "model"), "--served-model-name", "base", "--dtype", "float32"]
    flags += ["--device-memory", "64MiB", "--max-model-len", "4096"]
    flags += ["--lora-modules", *(f"{name}={folder / name}" for name in PROMPTS)]
    with running_server(folder / "log", *flags) as running:
        yield running


def ask(server: RunningServer, name: str, **fields: Any) -> tuple[str, int]:
    """Return the answer and the number of cached tokens in its usage."""
    body = {"model": name, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    response = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    reply = response.json()
    num_cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["text"], num_cached


def test_twenty_adapters_compute_their_context_once_and_answer_as_peft_does(
    server: RunningServer, answers: dict[str, str]
) -> None:
    assert len(set(answers.values())) > NUM_ADAPTERS // 2, "the adapters answer alike"
    first, *others = PROMPTS
    assert ask(server, first, prompt=PROMPTS[first]) == (answers[first], 0)
    with ThreadPoolExecutor(len(others)) as threads:
        replies = threads.map(lambda name: ask(server, name, prompt=PROMPTS[name]), others)
        found = dict(zip(others, replies, strict=True))
    num_shared = NUM_CONTEXT // BLOCK * BLOCK
    assert found == {name: (answers[name], num_shared) for name in others}


def test_the_base_and_its_aloras_share_a_context_but_not_with_other_salts(
    server: RunningServer,
) -> None:
    context, name = make_prompt(NUM_CONTEXT, seed=2), "intrinsic-3"
    prompt, num_shared = [*context, *INVOCATION, 5], NUM_CONTEXT // BLOCK * BLOCK
    assert ask(server, "base", prompt=[*context, 5])[1] == 0
    assert ask(server, name, prompt=prompt)[1] == num_shared
    assert ask(server, name, prompt=prompt, cache_salt="mine")[1] == 0
    assert ask(server, "base", prompt=[*context, 5], cache_salt="mine")[1] == num_shared
