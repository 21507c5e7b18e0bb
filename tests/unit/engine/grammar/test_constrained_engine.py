"""Constrained answers of an engine over a tiny random model, mixed with others."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loramux.engine.llm import LLM
from loramux.errors import InvalidRequest, LoramuxError
from loramux.types.grammar import Grammar
from loramux.types.request import FinishReason, LoRARequest, RequestOutput
from loramux.types.sampling import SamplingParams
from tests.engine_factory import save_model_with_tokenizer

EOS = 2
KINDS = ("string", "integer", "number", "boolean", "null", "enum", "array", "object")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    save_model_with_tokenizer(folder)
    return LLM(folder, device="cpu", dtype="float32", device_memory_bytes=2**24)


def params(grammar: Grammar | None = None, **settings: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "max_tokens": 200, "seed": 1, **settings},
        grammar=None if grammar is None else grammar.encode(),
    )


def answer(llm: LLM, sampling: SamplingParams, prompt: str = "Say it:") -> RequestOutput:
    return llm.generate(prompt, sampling, use_tqdm=False)[0]


def test_regex(llm: LLM) -> None:
    output = answer(llm, params(Grammar("regex", "[a-z]{4} (one|two)"), n=3))
    for choice in output.outputs:
        assert re.fullmatch("[a-z]{4} (one|two)", choice.text)
        assert choice.finish_reason is FinishReason.STOP
        assert choice.stop_reason is None
    assert len({choice.text for choice in output.outputs}) > 1
