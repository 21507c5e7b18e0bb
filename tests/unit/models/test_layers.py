"""What the comparison of whole models would not show: lower precision and padding-free shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loramux.models.layers import HeadNorm, Linear, RMSNorm, Rotary, inverse_frequencies, rotate_
from loramux.models.rope import RopeConfig


def test_linear_computes_x_weight_t_plus_bias() -> None:
    linear = Linear(3, 2, bias=True, dtype=torch.float32)
    linear.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 0.5]]))
    assert linear.bias is not None
    linear.bias.copy_(torch.tensor([10.0, 20.0]))
    assert linear(torch.tensor([[1.0, 1.0, 2.0]])).tolist() == [[19.0, 20.0]]


@pytest.mark.parametrize("num_rows", [1, 7])
def test_norm_on_cpu_equals_that_of_torch(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(96, eps=1e-3, dtype=torch.float32)
    norm.weight.copy_(torch.randn(96, generator=generator))
    rows = torch.randn(num_rows, 96, generator=generator) * 0.05
    expected = F.rms_norm(rows, (96,), norm.weight, 1e-3)
    torch.testing.assert_close(norm(rows), expected, atol=1e-6, rtol=1e-5)


def test_float32_norm_weight_is_not_rounded_on_bfloat16_rows() -> None:
    """1 + w of a Gemma norm does not fit into bfloat16."""
    norm = RMSNorm(4, eps=0.0, dtype=torch.float32)
    norm.weight.fill_(1.005)
    rows = torch.full((1, 4), 200.0, dtype=torch.bfloat16)
    assert norm(rows).dtype == torch.bfloat16
    assert torch.equal(norm(rows), torch.full((1, 4), 1.005).bfloat16())


def test_head_norm_uses_the_weight_of_each_head() -> None:
    norm = HeadNorm(2, 4, eps=0.0, dtype=torch.float32)
    norm.weight.copy_(torch.tensor([[1.0] * 4, [3.0] * 4]))
    heads = torch.tensor([[[5.0] * 4, [-2.0] * 4]])
    torch.testing.assert_close(norm(heads), torch.tensor([[[1.0] * 4, [-3.0] * 4]]))


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    rope = RopeConfig(theta=100.0)
    cos, sin = Rotary(rope, 4)(torch.tensor([0, 3]), torch.float32)
    heads = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(2, 1, 4).clone()
    turned = rotate_(heads, cos, sin)
    assert turned[0, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    pairs = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    angles = 3 * torch.tensor([1.0, 0.1])
    expected = pairs * torch.polar(torch.ones(2), angles)
    torch.testing.assert_close(turned[1, 0], torch.cat((expected.real, expected.imag)))


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(RopeConfig(), 8)
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(q_position: int, k_position: int) -> float:
        turned_q = rotate_(q.clone(), *rotary(torch.tensor([q_position]), torch.float32))
        turned_k = rotate_(k.clone(), *rotary(torch.tensor([k_position]), torch.float32))
        return float((turned_q * turned_k).sum())

    assert score(7, 2) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(7, 2) != pytest.approx(score(7, 3), abs=1e-4)


def test_yarn_without_attention_factor_derives_it() -> None:
    rope = RopeConfig(rope_type="yarn", factor=4.0, original_max_position=64)
    assert inverse_frequencies(rope, 8)[1] == pytest.approx(1.1386294)
    both = RopeConfig(
        rope_type="yarn", factor=4.0, original_max_position=64, mscale=1.0, mscale_all_dim=1.0
    )
    assert inverse_frequencies(both, 8)[1] == 1.0
