from __future__ import annotations

from pathlib import Path

import torch

from loramux.engine.probe import max_logit_change
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import peft_logits, save_model_with_tokenizer


def test_the_probe_equals_what_peft_changes_on_the_same_tokens(tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    folder = make_peft_adapter(tmp_path / "adapter", model)
    tokens = tuple((i * 7919 + 1) % 512 for i in range(32))
    expected = (peft_logits(model, folder, tokens) - peft_logits(model, None, tokens)).abs().max()
    change = torch.tensor(max_logit_change(tmp_path / "model", folder))
    torch.testing.assert_close(change, expected, atol=1e-4, rtol=1e-4)
