"""Builds the events of sequences: a token, or the end."""

from __future__ import annotations

from loramux.scheduler.sequence import Sequence
from loramux.types.request import FinishReason, Request, TokenEvent, TokenLogprob


def token_event(
    sequence: Sequence,
    token_id: int,
    reason: FinishReason | None,
    logprob: TokenLogprob | None = None,
) -> TokenEvent:
    """Build the event of the token that was appended to the sequence's output last."""
    is_first = len(sequence.output_token_ids) == 1
    is_stop = reason is FinishReason.STOP
    ends_grammar = sequence.constraint is not None and not ends_answer(sequence, token_id)
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_id=token_id,
        finish_reason=reason,
        stop_token_id=token_id if is_stop and not ends_grammar else None,
        logprob=logprob,
        prompt_logprobs=(sequence.prompt_logprobs or None) if is_first else None,
        num_reused=sequence.num_reused_tokens if is_first else 0,
        started_s=sequence.first_started_s if is_first else None,
    )


def finish_reason(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Return why the sequence ends with its newest token, `token_id`, or None if it goes on."""
    is_complete = sequence.constraint is not None and sequence.constraint.is_complete
    if is_complete or ends_answer(sequence, token_id):
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.is_full else None


def ends_answer(sequence: Sequence, token_id: int) -> bool:
    """Return whether the token is a stop token, which is not part of the answer's text."""
    request, params = sequence.request, sequence.request.params
    if token_id in params.stop_token_ids:
        return True
    # The last token of a complete grammar ends it whatever the request says of such tokens.
    is_complete = sequence.constraint is not None and sequence.constraint.is_complete
    return token_id in request.eos_token_ids and (is_complete or not params.ignore_eos)


def full_event(sequence: Sequence) -> TokenEvent:
    """Build the end of a sequence for which the pool has no more pages."""
    if sequence.request.pooling is not None:
        message = (
            f"The pool has no more pages for the prompt of {len(sequence.prompt_token_ids)} "
            "tokens: pinned adapters take the rest. Unpin one, or shorten the prompt."
        )
        return error_event(sequence, "memory", message)
    return end_event(sequence)


def end_event(sequence: Sequence) -> TokenEvent:
    """Build the end of a sequence without a token: max_tokens is 0, or the pool is full."""
    is_first = not sequence.output_token_ids
    is_pooled = sequence.request.pooling is not None
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_id=None,
        finish_reason=FinishReason.STOP if is_pooled else FinishReason.LENGTH,
        prompt_logprobs=(sequence.prompt_logprobs or None) if is_first else None,
        num_reused=sequence.num_reused_tokens if is_first else 0,
        started_s=sequence.first_started_s if is_first else None,
        pooled=sequence.pooled_vector(),
    )


def error_event(sequence: Sequence, code: str, message: str) -> TokenEvent:
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_id=None,
        finish_reason=FinishReason.ERROR,
        error=message,
        error_code=code,
    )


def numeric_message(sequence: Sequence, reason: str) -> str:
    """Return the error of a sequence that has no valid token."""
    cids = sequence.cids
    if not cids:
        return f"The base model has no token for this request: {reason}. Check its weights."
    adapters = "Adapter" if len(cids) == 1 else "The sum of adapters"
    return (
        f"{adapters} {', '.join(cids)} gives no token for this request: {reason}. The weights "
        "overflow when they are computed; give an adapter whose training did not diverge."
    )


def timeout_event(sequence: Sequence) -> TokenEvent:
    request = sequence.request
    where = "it was still waiting for a slot" if sequence.started_s is None else "it was running"
    return error_event(
        sequence,
        "timeout",
        f"The request timed out after {request.timeout_s:g} s: "
        f"{sequence.num_known_outputs} of {request.params.max_tokens} tokens were made, and "
        f"{where}. Ask for fewer tokens, allow more time, or try again when the server is less "
        "busy.",
    )


def refusal_events(request: Request, error: Exception) -> list[TokenEvent]:
    """Build the ends of all choices of a request that was refused after its arrival."""
    return [
        TokenEvent(
            request_id=request.request_id,
            index=index,
            token_id=None,
            finish_reason=FinishReason.ERROR,
            error=str(error),
            error_code="invalid",
        )
        for index in range(request.params.n)
    ]
