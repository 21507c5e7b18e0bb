"""What a reply says about tokens beside their text: ids, and log probabilities of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.generate.sampling import MaxTokens
from loramux.types.request import TokenLogprob
from loramux.wire.text import OpenAiBody, PromptLogprob, PromptLogprobs

# JSON cannot represent -Infinity.
LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What a request wants to know about tokens."""

    token_ids: bool = False
    """The ids of the tokens of prompt and answer."""
    as_ids: bool = False
    """Tokens of log probabilities are written as `token_id:N`."""
    prompt_logprobs: bool = False


def token_report(body: OpenAiBody) -> TokenReport:
    return TokenReport(
        token_ids=bool(body.return_token_ids),
        as_ids=bool(body.return_tokens_as_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
    )


def show_token(codec: TextCodec, token_id: int, report: TokenReport) -> str:
    return f"token_id:{token_id}" if report.as_ids else codec.token_to_str(token_id)


def prompt_logprobs(
    codec: TextCodec, logprobs: Sequence[TokenLogprob]
) -> list[PromptLogprobs | None]:
    """vLLM's list: null for the first token, then the alternatives at each position by id."""

    def shown(entry: TokenLogprob) -> PromptLogprobs:
        ranked = {i: (logprob, rank) for rank, (i, logprob) in enumerate(entry.top, 1)}
        ranked.setdefault(entry.token_id, (entry.logprob, entry.rank))
        return {
            str(i): PromptLogprob(
                logprob=max(logprob, LOWEST), rank=rank, decoded_token=codec.token_to_str(i)
            )
            for i, (logprob, rank) in ranked.items()
        }

    return [None, *map(shown, logprobs)]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of a prompt are kept, and at which end."""

    num_kept: int | None = None
    """None: all, -1: as many as fit."""
    keeps_start: bool = False
    max_tokens: MaxTokens = MaxTokens(None)

    def cut(self, token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        kept = self.num_kept
        if kept == -1:
            kept = max(1, max_model_len - (self.max_tokens.value or 1))
        if kept is None or len(token_ids) <= kept:
            return token_ids
        return token_ids[:kept] if self.keeps_start else token_ids[-kept:]


def truncation_of(body: OpenAiBody) -> Truncation:
    kept = body.truncate_prompt_tokens
    check_kept(kept)
    return Truncation(kept, body.truncation_side == "right")


def check_kept(kept: int | None) -> None:
    if kept is not None and kept != -1 and kept < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or over 0, got {kept}.",
            param="truncate_prompt_tokens",
        )
