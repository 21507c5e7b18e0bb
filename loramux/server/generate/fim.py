"""Prompts that have a hole to fill: the text before it, the text after it, and a model's tokens.

They are made of token ids, so that a text that spells one of these tokens stays text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.chat.tools.families import token_of
from loramux.server.generate.prompts import check_characters, check_num_tokens
from loramux.types.sampling import SamplingParams
from loramux.wire.text import CompletionRequest

_ANCHOR = "\n"


@dataclass(frozen=True, slots=True)
class FillPrompt:
    """A hole between two texts."""

    prefix: str | Sequence[int]
    suffix: str
    start: str = ""
    """Text with which the answer has begun."""
    files: Sequence[tuple[str, str]] = ()
    """Names and contents of other files, which some models read before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillFormat:
    """The tokens of a family of models, and their order."""

    models: str
    prefix: str
    suffix: str
    middle: str = ""
    """Begins the answer; without it the suffix comes before the prefix."""
    repository: str = ""
    file: str = ""
    """Begins another file."""
    ends: tuple[str, ...] = ()
    """Tokens that end the answer beside the model's own."""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))

    @property
    def all_marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.marks, self.repository, self.file, *self.ends)))


FORMATS = (
    FillFormat(
        models="Qwen2.5-Coder, CodeGemma",
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        repository="<|repo_name|>",
        file="<|file_sep|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|file_separator|>"),
    ),
    FillFormat(
        models="StarCoder",
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        repository="<repo_name>",
        file="<file_sep>",
        ends=("<|endoftext|>", "<fim_pad>"),
    ),
    FillFormat(
        models="SantaCoder",
        prefix="<fim-prefix>",
        suffix="<fim-suffix>",
        middle="<fim-middle>",
        ends=("<|endoftext|>", "<fim-pad>"),
    ),
    FillFormat(
        models="CodeLlama", prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",)
    ),
    FillFormat(
        models="DeepSeek-Coder",
        prefix="<｜fim▁begin｜>",
        suffix="<｜fim▁hole｜>",
        middle="<｜fim▁end｜>",
    ),
    FillFormat(models="Codestral", prefix="[PREFIX]", suffix="[SUFFIX]"),
)


class Filler:
    """Encodes prompts with a hole for one tokenizer."""

    def __init__(self, codec: TextCodec, *, param: str = "suffix") -> None:
        """Raise InvalidRequest, with the field that asks, for a model without such tokens."""
        self._codec = codec
        for found in FORMATS:
            if all(token_of(codec, mark) is not None for mark in found.marks):
                self._format = found
                break
        else:
            models = ", ".join(one.models for one in FORMATS)
            raise InvalidRequest(
                f"{param}: the tokenizer of this model has no tokens for a hole in its text. "
                f"Models that have them: {models}. Leave {param} out, or serve one of these.",
                param=param,
            )
        tokens = ((mark, token_of(codec, mark)) for mark in self._format.all_marks)
        self._ids = {mark: token for mark, token in tokens if token is not None}
        # Tokenizers that write spaces as ▁ find such a token after a space, too.
        spelled = (re.escape(mark).replace("▁", "[▁ ]") for mark in self._ids)
        self._spelled = re.compile("|".join(spelled))

    def end(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of an answer that ends where another file or hole begins."""
        ends = dict.fromkeys((*params.stop_token_ids, *self._ids.values()))
        return structs.replace(params, stop_token_ids=tuple(ends))

    def encode(
        self, prompt: FillPrompt, *, max_model_len: int, add_special_tokens: bool = True
    ) -> list[int]:
        files = [part for file in prompt.files for part in file]
        for text in (prompt.prefix, prompt.suffix, prompt.start, *files):
            if isinstance(text, str):
                check_characters(len(text), max_model_len, "prompt")
                check_num_tokens(self._codec, text, max_model_len, "prompt")
        form, ids = self._format, self._ids
        is_text = isinstance(prompt.prefix, str)
        prefix = self._text(prompt.prefix) if isinstance(prompt.prefix, str) else prompt.prefix
        before = [ids[form.prefix], *prefix]
        after = [ids[form.suffix], *self._continued(prompt.suffix)]
        start = self._continued(prompt.start) if prompt.start else []
        begin = self._codec.encode("") if is_text and add_special_tokens else []
        hole = [*before, *after, ids[form.middle]] if form.middle else [*after, *before]
        return [*begin, *self._others(prompt), *hole, *start]

    def _others(self, prompt: FillPrompt) -> list[int]:
        if not prompt.files:
            return []
        repository, file = self._ids.get(self._format.repository), self._ids.get(self._format.file)
        if repository is None or file is None:
            raise InvalidRequest(
                "input_extra: this model has no tokens for other files. Leave it out.",
                param="input_extra",
            )
        token_ids = [repository, *self._text("project\n")]
        for name, content in (*prompt.files, ("file", "")):
            token_ids += [file, *self._text(f"{name}\n{content}")]
        return token_ids

    def _text(self, text: str) -> list[int]:
        """Return the tokens of a text; where it spells a mark it is cut inside of it."""
        pieces = self._cut(text)
        first = self._codec.encode(pieces[0], add_special_tokens=False)
        return first + [token for piece in pieces[1:] for token in self._inside(piece)]

    def _continued(self, text: str) -> list[int]:
        """Return the tokens of a text without the space that some tokenizers put before it."""
        return [token for piece in self._cut(text) for token in self._inside(piece)]

    def _cut(self, text: str) -> list[str]:
        ends = [found.start() + 1 for found in self._spelled.finditer(text)]
        return [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True)]

    def _inside(self, text: str) -> list[int]:
        before = self._codec.encode(_ANCHOR, add_special_tokens=False)
        if before and self._codec.token_bytes(before[0]).startswith(b" "):
            token_ids = self._codec.encode(_ANCHOR + text, add_special_tokens=False)
            if token_ids[: len(before)] == before:
                return token_ids[len(before) :]
        return self._codec.encode(text, add_special_tokens=False)


def check_hole(body: CompletionRequest) -> None:
    """Raise InvalidRequest for fields that do not go with a suffix."""
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} does not go with suffix: leave it out.", param=name)
