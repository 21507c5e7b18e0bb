"""Sampling parameters of a request, validated on construction."""

from __future__ import annotations

import math

import msgspec

from loramux.errors import InvalidRequest

MAX_LOGPROBS = 64
MAX_CHOICES = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters; a temperature of 0 selects the most likely token."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives to report for each sampled token; 0: only the token itself."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report for each prompt token; `echo` with `logprobs` needs it."""
    skip_special_tokens: bool = True
    grammar: str | None = None
    """What the answer must look like: `Grammar.encode()` of loramux.types.grammar."""
    min_tokens: int = 0
    """Before so many tokens, no stop token is generated and no stop string is looked for."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be generated; None: all."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that are never generated."""
    num_speculative_tokens: int | None = None
    """Most drafts in one step; 0: none; None: as many as the engine's setting allows."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name, value, is_allowed, limit in self._limits():
            if not is_allowed:
                raise InvalidRequest(f"{name} must be {limit}, got {value!r}.", param=name)

    def _limits(self) -> list[tuple[str, object, bool, str]]:
        return [
            ("n", self.n, 1 <= self.n <= MAX_CHOICES, f"between 1 and {MAX_CHOICES}"),
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k, self.top_k >= -1, "-1, 0 (no limit) or a positive number"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0 < self.repetition_penalty < math.inf,
                "over 0",
            ),
            *(
                (name, value, -2 <= value <= 2, "in [-2, 2]")
                for name, value in (
                    ("frequency_penalty", self.frequency_penalty),
                    ("presence_penalty", self.presence_penalty),
                )
            ),
            (
                "logit_bias",
                self.logit_bias,
                all(-100 <= bias <= 100 for bias in self.logit_bias.values()),
                "numbers in [-100, 100]",
            ),
            ("stop", self.stop, all(self.stop), "strings that are not empty"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 0, "0 or more"),
            ("min_tokens", self.min_tokens, self.min_tokens >= 0, "0 or more"),
            (
                "allowed_token_ids",
                self.allowed_token_ids,
                self.allowed_token_ids != (),
                "not empty",
            ),
            (
                "num_speculative_tokens",
                self.num_speculative_tokens,
                (self.num_speculative_tokens or 0) >= 0,
                "0 or more",
            ),
            ("bad_words", self.bad_words_token_ids, all(self.bad_words_token_ids), "not empty"),
            *(
                (name, value, value is None or 0 <= value <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
                for name, value in (
                    ("logprobs", self.logprobs),
                    ("prompt_logprobs", self.prompt_logprobs),
                )
            ),
        ]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_constrained(self) -> bool:
        """Whether some tokens may not be generated."""
        return (
            self.grammar is not None
            or self.min_tokens > 0
            or self.allowed_token_ids is not None
            or bool(self.bad_words_token_ids)
        )

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )
