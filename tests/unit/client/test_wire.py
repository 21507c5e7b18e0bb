"""Shapes of bodies; what happens on the wire is in test_client.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from loramux.client.wire import Prompt, Target, chat_call, client_options, completion_call


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("text", 1), (["a", "b", "c"], 3), ([1, 2, 3], 1), ([[1], [2]], 2), ([], 1)],
)
def test_prompts_are_counted_as_the_server_counts_them(prompt: Prompt, num_prompts: int) -> None:
    assert completion_call(prompt, Target(), {}, stream=True).num_choices == num_prompts
    assert completion_call(prompt, Target(), {"n": 2}, stream=True).num_choices == 2 * num_prompts


@pytest.mark.parametrize("sampling", [{}, {"n": None}, {"n": 1}])
def test_a_chat_has_one_choice_unless_more_are_wanted(sampling: dict[str, Any]) -> None:
    assert chat_call([], Target(), sampling, stream=False).num_choices == 1


@pytest.mark.parametrize(
    "url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"]
)
def test_an_openai_base_url_works_too(url: str) -> None:
    assert client_options(url, None, 1.0)["base_url"] == "http://host:1"


def test_the_client_loads_no_torch_and_no_engine() -> None:
    code = (
        "import sys, loramux.client.client, loramux.client.async_client\n"
        "wanted = {'loramux', 'loramux.errors', 'loramux.client'}\n"
        "extra = {n for n in sys.modules if n.startswith('loramux')} - wanted\n"
        "extra = {n for n in extra if not n.startswith('loramux.client.')}\n"
        "assert not extra, extra\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
