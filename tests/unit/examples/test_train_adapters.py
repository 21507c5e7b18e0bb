from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from demo_tasks.catalog import demo_tasks
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from train_adapters import (
    BATCH_SIZE,
    NO_TARGET,
    TokenizedExample,
    answer_loss,
    batches,
    common_prefix,
    learning_rate_factor,
    save,
)

PREFIX = [1, 2, 3]
EXAMPLES = [TokenizedExample([4, 5, 6, 7, 8], 2), TokenizedExample([9, 10, 11], 1)]


def tiny_adapter() -> PeftModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False
    )
    return get_peft_model(LlamaForCausalLM(config), lora)


def whole_conversations_loss(model: PeftModel) -> torch.Tensor:
    length = len(PREFIX) + max(len(example.token_ids) for example in EXAMPLES)
    token_ids = torch.zeros(len(EXAMPLES), length, dtype=torch.long)
    labels = torch.full_like(token_ids, NO_TARGET)
    mask = torch.zeros_like(token_ids)
    for row, example in enumerate(EXAMPLES):
        end = len(PREFIX) + len(example.token_ids)
        token_ids[row, :end] = torch.tensor(PREFIX + example.token_ids)
        start = len(PREFIX) + example.num_prompt_tokens
        labels[row, start:end] = token_ids[row, start:end]
        mask[row, :end] = 1
    return model(input_ids=token_ids, attention_mask=mask, labels=labels).loss


def test_a_shared_prefix_gives_the_loss_and_gradients_of_whole_conversations() -> None:
    model = tiny_adapter()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    loss = answer_loss(model, PREFIX, EXAMPLES)
    gradients = torch.autograd.grad(loss, weights)
    expected_loss = whole_conversations_loss(model)
    expected = torch.autograd.grad(expected_loss, weights)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected)


def test_common_prefix_is_that_of_all_sequences() -> None:
    assert common_prefix([[1, 2, 3, 9], [1, 2, 4], [1, 2, 3, 1]]) == [1, 2]
    assert common_prefix([[1, 2], [1, 2, 3]]) == [1, 2]


def test_every_example_is_used_once_before_any_is_used_again() -> None:
    task = demo_tasks()["sentiment"]
    examples = [TokenizedExample([number], 0) for number in range(BATCH_SIZE * 3)]
    used = [example for batch in batches(examples, task) for example in batch]
    assert len(used) == task.num_steps * BATCH_SIZE
    assert sorted(e.token_ids for e in used[: len(examples)]) == [e.token_ids for e in examples]


def test_the_learning_rate_rises_and_falls_to_almost_nothing() -> None:
    factors = [learning_rate_factor(step, 50) for step in range(50)]
    assert factors[0] < max(factors)
    assert max(factors) == pytest.approx(1, abs=0.05)
    assert factors[-1] < 0.01


def test_what_is_saved_is_what_peft_loads_again(tmp_path: Path) -> None:
    model = tiny_adapter()
    size = save(model, tmp_path, demo_tasks()["shout"])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    base = LlamaForCausalLM(model.get_base_model().config)
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    assert size == (tmp_path / "adapter_model.safetensors").stat().st_size
    assert config["target_modules"] == sorted(config["target_modules"])
    for name, weight in loaded.state_dict().items():
        if "lora_" in name:
            expected = model.state_dict()[name].to(torch.float16).float()
            assert torch.equal(weight.float(), expected)
