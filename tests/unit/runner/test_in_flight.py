from __future__ import annotations

import torch

from loramux.runner.in_flight import FinishedStep, LaunchedStep
from loramux.types.step import StepResult


def test_a_result_is_read_once_and_survives_reuse_of_the_buffer() -> None:
    host = torch.tensor([[41, 0], [42, 0], [43, 0]], dtype=torch.int32)
    step = LaunchedStep([7, 5], host, None)
    assert not step.is_done
    assert step.result().accepted == {7: [41], 5: [42]}
    host.zero_()
    assert step.result().accepted == {7: [41], 5: [42]}


def test_invalid_tokens_fail_their_sequences() -> None:
    host = torch.tensor([[41, 0], [42, 1], [43, 0], [44, 1]], dtype=torch.int32)
    result = LaunchedStep([7, 5, 3], host, None).result()
    assert result.accepted == {7: [41], 5: [42], 3: [43]}
    assert list(result.failed) == [5]


def test_a_finished_step_is_done() -> None:
    result = StepResult({1: [2]})
    assert FinishedStep(result).is_done and FinishedStep(result).result() is result
