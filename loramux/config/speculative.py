"""Settings of speculative decoding, in vLLM's JSON form."""

from __future__ import annotations

import msgspec

from loramux.errors import InvalidRequest

METHODS = ("ngram",)
MAX_SPECULATIVE_TOKENS = 32
"""Most drafts of a sequence in one step."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where drafts come from, and how many a step may have."""

    method: str = "ngram"
    """ngram: prompt lookup."""
    num_speculative_tokens: int = 8
    """Most drafts of a sequence in one step; each sequence has as many as its acceptance pays."""
    prompt_lookup_min: int = 3
    """Newest tokens that must have occurred before."""
    prompt_lookup_max: int = 16
    """Newest tokens that are compared; of several places the longest match is taken."""
    max_rows: int = 32
    """Sequences and drafts of a step together: more rows take longer than they save."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidRequest(
                f"speculative_config has the method {self.method!r}, and only "
                f"{', '.join(METHODS)} is implemented.",
                param="speculative_config",
            )
        limits = {
            "num_speculative_tokens": (self.num_speculative_tokens, MAX_SPECULATIVE_TOKENS),
            "prompt_lookup_min": (self.prompt_lookup_min, self.prompt_lookup_max),
            "prompt_lookup_max": (self.prompt_lookup_max, 64),
            "max_rows": (self.max_rows, 256),
        }
        for name, (value, most) in limits.items():
            if not 1 <= value <= most:
                raise InvalidRequest(
                    f"speculative_config: {name} must be from 1 to {most}, got {value}.",
                    param="speculative_config",
                )


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Parse vLLM's JSON form; raise InvalidRequest with the reason."""
    try:
        return msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f'speculative_config must be JSON such as {{"method": "ngram", '
            f'"num_speculative_tokens": 8}}: {error}.',
            param="speculative_config",
        ) from error
