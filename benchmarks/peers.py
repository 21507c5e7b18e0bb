"""transformers and PEFT on the same weights, prompts and dtype as the engine."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loramux import LLM


class Peers:
    def __init__(self, llm: LLM, num_output: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            llm.model_folder, dtype=llm.engine.executor.dtype
        ).eval()
        # As ignore_eos: the end is a token like the others, neither obeyed nor forbidden.
        self._model.generation_config.eos_token_id = None
        self._peft: PeftModel | None = None
        self._num_output = num_output

    def base(self, prompts: list[list[int]]) -> list[list[int]]:
        """All prompts in one static batch."""
        return self._generate(prompts)

    def load(self, folders: list[Path]) -> None:
        for folder in folders:
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(
                    self._model, folder, adapter_name=folder.name
                )
            elif folder.name not in self._peft.peft_config:
                self._peft.load_adapter(folder, adapter_name=folder.name)

    def sequential(self, prompts: list[list[int]], folders: list[Path]) -> list[list[int]]:
        """One adapter after the other, each with its own requests in one batch."""
        assert self._peft is not None
        outputs: dict[int, list[int]] = {}
        for number, folder in enumerate(folders):
            self._peft.set_adapter(folder.name)
            mine = list(range(number, len(prompts), len(folders)))
            outputs |= dict(zip(mine, self._generate([prompts[i] for i in mine]), strict=True))
        return [outputs[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def gap(self, prompt: list[int], ours: list[int], theirs: list[int], folder: Path) -> float:
        """How far apart, in float64, the two tokens' logits are where the answers part."""
        assert self._peft is not None
        self._peft.set_adapter(folder.name)
        place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        self._peft.double()
        logits = self._peft(input_ids=torch.tensor([prompt + theirs[:place]])).logits[0, -1]
        self._peft.float()
        return float(logits[theirs[place]] - logits[ours[place]])

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
