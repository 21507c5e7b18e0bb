"""Packed integers with scales per group: AWQ, GPTQ and compressed-tensors pack-quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loramux.models.quantised.codes import WORD_BITS, by_index, grouped, unpack_words
from loramux.models.quantised.parts import Parts
from loramux.types.quantisation import AwqFormat, GptqFormat, PackedIntFormat

AWQ_BITS = 4
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output 8 * word + i of AWQ is nibble AWQ_NIBBLES[i] of the word."""
INTEGERS = (torch.int32, torch.int64)
IntegerFormat = AwqFormat | GptqFormat | PackedIntFormat


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """weight = (codes - zeros) * scales, of the group of each input."""

    codes: Tensor
    """[outputs, inputs]"""
    scales: Tensor
    """[outputs, groups]"""
    zeros: Tensor | float
    """[outputs, groups], or one for all"""
    group_of: Tensor | None = None
    """Group of each input; None: groups of consecutive inputs."""

    def dequantised(self) -> Tensor:
        if self.group_of is None:
            return grouped(self.codes, self.scales, self.zeros)
        return by_index(self.codes, self.scales, self.zeros, self.group_of)


def awq_integers(parts: Parts, weight_format: AwqFormat) -> IntegerWeight:
    words = parts.matrix("qweight", (torch.int32,))
    inputs, out = words.shape[0], words.shape[1] * WORD_BITS // AWQ_BITS
    groups = inputs // parts.group(weight_format.group_size, inputs)
    zeros = parts.take("qzeros", (torch.int32,), shape=(groups, words.shape[1]))
    scale = parts.take("scales", shape=(groups, out))
    return IntegerWeight(awq_codes(words).t().contiguous(), scale.t(), awq_codes(zeros).t())


def awq_codes(words: Tensor) -> Tensor:
    codes = unpack_words(words, AWQ_BITS).view(len(words), -1, len(AWQ_NIBBLES))
    return codes[:, :, AWQ_NIBBLES].flatten(1)


def gptq_integers(parts: Parts, weight_format: GptqFormat) -> IntegerWeight:
    bits = weight_format.bits
    words = parts.matrix("qweight", (torch.int32,))
    inputs, out = words.shape[0] * WORD_BITS // bits, words.shape[1]
    groups = inputs // parts.group(weight_format.group_size, inputs)
    scale = parts.take("scales", shape=(groups, out)).t()
    zero = gptq_zeros(parts, weight_format, (groups, out * bits // WORD_BITS)).t()
    codes = unpack_words(words.t(), bits)
    group_of = group_index(parts, "g_idx", inputs, groups, is_needed=weight_format.act_order)
    return IntegerWeight(codes, scale, zero, group_of)


def gptq_zeros(parts: Parts, weight_format: GptqFormat, shape: tuple[int, int]) -> Tensor:
    """Return the zero points [groups, out]; version 1 stores them minus one.

    A zero point of 0 became the largest code there, with or without a borrow from its neighbour
    by the tool that wrote the file, so that it cannot be read with certainty.
    """
    words = parts.take("qzeros", (torch.int32,), shape=shape)
    stored = unpack_words(words, weight_format.bits)
    if not weight_format.stores_zeros_minus_one:
        return stored
    if bool((stored == 2**weight_format.bits - 1).any()):
        raise parts.wrong(
            "qzeros",
            "holds a zero point of 0 in version 1 of GPTQ, which tools write in different ways: "
            "use a checkpoint with checkpoint_format gptq_v2",
        )
    return stored + 1


def group_index(
    parts: Parts, name: str, inputs: int, groups: int, *, is_needed: bool
) -> Tensor | None:
    """Return the group of each input; None if the groups are consecutive inputs."""
    if name not in parts and not is_needed:
        return None
    found = parts.take(name, INTEGERS, shape=(inputs,)).long()
    if int(found.min()) < 0 or int(found.max()) >= groups:
        raise parts.wrong(
            name, f"names groups from {int(found.min())} to {int(found.max())}; there are {groups}"
        )
    size = inputs // groups
    is_plain = torch.equal(found, torch.arange(inputs, device=found.device) // size)
    return None if is_plain else found


def packed_integers(parts: Parts, weight_format: PackedIntFormat) -> IntegerWeight:
    bits = weight_format.bits
    words = parts.matrix("weight_packed", (torch.int32,))
    out, inputs = packed_shape(parts, words, bits)
    groups = inputs // parts.group(weight_format.group_size, inputs)
    scale = parts.take("weight_scale", shape=(out, groups))
    zero: Tensor | float = float(2 ** (bits - 1))
    if not weight_format.symmetric:
        shape = (-(-out * bits // WORD_BITS), groups)
        packed = parts.take("weight_zero_point", (torch.int32,), shape=shape)
        zero = unpack_words(packed.t(), bits)[:, :out].t()
    codes = unpack_words(words, bits)[:, :inputs].contiguous()
    group_of = group_index(parts, "weight_g_idx", inputs, groups, is_needed=False)
    return IntegerWeight(codes, scale, zero, group_of)


def packed_shape(parts: Parts, words: Tensor, bits: int) -> tuple[int, int]:
    """Return outputs and inputs as the file tells them, and check the packed tensor by them."""
    shape = parts.take("weight_shape", INTEGERS, shape=(2,))
    out, inputs = (int(size) for size in shape)
    parts.check_shape("weight_packed", words, (out, -(-inputs * bits // WORD_BITS)))
    return out, inputs


INTEGERS_OF: dict[type[Any], Callable[[Parts, Any], IntegerWeight]] = {
    AwqFormat: awq_integers,
    GptqFormat: gptq_integers,
    PackedIntFormat: packed_integers,
}


def dequantise_integers(parts: Parts, weight_format: IntegerFormat) -> Tensor:
    return INTEGERS_OF[type(weight_format)](parts, weight_format).dequantised()
