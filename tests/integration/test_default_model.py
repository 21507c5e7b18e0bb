"""SmolLM2 out of its GGUF, through the whole engine, against transformers on the same weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from loramux import LLM, SamplingParams


def test_logits_equal_transformers_and_the_capital_of_france_is_paris() -> None:
    llm = LLM(dtype="float32", device_memory_bytes=2**28)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert answer.outputs[0].text == "The capital of France is Paris."
    tokens = answer.prompt_token_ids + answer.outputs[0].token_ids
    (logits,) = llm.engine.prompt_logits([(tokens, ())])
    model = AutoModelForCausalLM.from_pretrained(llm.model_folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    # Logits reach 38 here, and transformers in float32 is itself 2.0e-4 away from float64.
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
