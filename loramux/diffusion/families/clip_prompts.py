"""Prompts of any length for CLIP: chunks of 75 tokens and weights of words, as in A1111."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loramux.errors import InvalidRequest
from loramux.types.emphasis import Fragment

MAX_CHUNKS = 16
_WRAP_TOKENS = 20
"""A chunk ends at its last comma if that is among so many last tokens."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What CLIP reads at once, without its first and last token."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


def chunks_of(tokenizer: Any, fragments: Sequence[Fragment]) -> list[Chunk]:
    """Return at least one chunk; raise InvalidRequest for a prompt of too many."""
    size = int(tokenizer.model_max_length) - 2
    ids, weights = [], []
    for fragment in fragments:
        found = tokenizer(fragment.text, add_special_tokens=False).input_ids
        ids += found
        weights += [fragment.weight] * len(found)
    if len(ids) > size * MAX_CHUNKS:
        raise InvalidRequest(
            f"A prompt of this model has at most {size * MAX_CHUNKS} tokens, got {len(ids)}.",
            param="prompt",
        )
    comma = tokenizer(",", add_special_tokens=False).input_ids
    spans = _spans(ids, size, comma[0] if len(comma) == 1 else None)
    return [Chunk(tuple(ids[a:b]), tuple(weights[a:b])) for a, b in spans]


def _spans(ids: list[int], size: int, comma: int | None) -> Iterator[tuple[int, int]]:
    first = 0
    while len(ids) - first > size:
        end = first + size
        commas = [i for i in range(end - _WRAP_TOKENS, end) if i > first and ids[i] == comma]
        # The token after a full chunk may be the comma of its last words.
        after = commas[-1] + 1 if commas and ids[end] != comma else end
        yield first, after
        first = after
    yield first, len(ids)


def encode_chunks(encoder: Any, tokenizer: Any, chunks: Sequence[Chunk]) -> tuple[Tensor, Any]:
    """Return the last but one hidden states [1, chunks x 77, dim], and the encoder's output."""
    length = int(tokenizer.model_max_length)
    rows, factors = [], []
    for chunk in chunks:
        room = length - 2 - len(chunk.ids)
        padding = [tokenizer.pad_token_id] * room
        rows.append([tokenizer.bos_token_id, *chunk.ids, tokenizer.eos_token_id, *padding])
        factors.append([1.0, *chunk.weights, 1.0, *[1.0] * room])
    out = encoder(torch.tensor(rows, device=encoder.device), output_hidden_states=True)
    states = out.hidden_states[-2]
    if any(weight != 1 for chunk in chunks for weight in chunk.weights):
        states = _weighed(states, torch.tensor(factors, device=states.device))
    return states.reshape(1, -1, states.shape[-1]), out


def _weighed(states: Tensor, weights: Tensor) -> Tensor:
    """Multiply each token by its weight, and restore the mean of each chunk."""
    given = states.float()
    scaled = given * weights[:, :, None]
    means = [one.mean(dim=(1, 2), keepdim=True) for one in (given, scaled)]
    return (scaled * (means[0] / means[1])).to(states.dtype)
