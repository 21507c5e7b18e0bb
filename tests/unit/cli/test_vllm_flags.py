"""Start scripts of vLLM: what runs, and what is refused by name."""

from __future__ import annotations

import pytest

from loramux.cli.vllm_flags import VLLM_FLAGS, Refused, Same, translate_vllm_flags
from loramux.config.fields import flag
from loramux.config.serve import SETTINGS
from loramux.errors import InvalidRequest


def test_a_common_command_line_is_translated() -> None:
    args = ["--model", "m", "--enable-lora", "--max-num-seqs", "64", "--tensor-parallel-size=1"]
    args += ["--swap-space", "4", "--disable-log-requests", "--max-loras", "8"]
    assert translate_vllm_flags(args) == [
        *("--model", "m", "--max-sequences", "64", "--max-loras", "8")
    ]
    assert translate_vllm_flags(["--max_num_seqs=3"]) == ["--max-sequences=3"]


@pytest.mark.parametrize(
    "args",
    [["--tensor-parallel-size", "2"], ["-tp", "2"], ["--lora-dtype"], ["--seed", "1"]],
)
def test_what_cannot_be_honoured_is_refused_by_name(args: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=args[0]):
        translate_vllm_flags(args)


def test_no_own_flag_is_hidden_and_every_translation_exists() -> None:
    own = {flag(name) for name in SETTINGS}
    assert not own & VLLM_FLAGS.keys()
    for fate in VLLM_FLAGS.values():
        assert not isinstance(fate, Same) or fate.flag in own
        assert not isinstance(fate, Refused) or fate.why.endswith(".")
