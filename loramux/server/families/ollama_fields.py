"""Fields of Ollama's bodies and replies that have a form of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.generate.token_reports import LOWEST
from loramux.types.request import TokenLogprob

_UNITS = r"(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[+-]?(?:0|(?:{_UNITS})+)")
_MAX_SHOWN = 100


def is_zero(keep_alive: Any) -> bool:
    """Whether a time to stay loaded is 0; raises InvalidRequest for what is no time.

    It is a number of seconds, or a text such as 5m or 1h30m.
    """
    if keep_alive is None:
        return False
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        return keep_alive == 0
    if isinstance(keep_alive, str) and _DURATION.fullmatch(keep_alive):
        return not any(digit in keep_alive for digit in "123456789")
    shown = str(keep_alive)[:_MAX_SHOWN]
    raise InvalidRequest(f'time: invalid duration "{shown}"', param="keep_alive")


def written_logprobs(codec: TextCodec, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the log probabilities of tokens, with the most likely ones where they were asked."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": codec.token_to_str(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(codec.token_bytes(token_id)),
        }

    return [
        shown(one.token_id, one.logprob)
        | ({"top_logprobs": [shown(i, logprob) for i, logprob in one.top]} if one.top else {})
        for one in logprobs
    ]
