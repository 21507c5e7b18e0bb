"""Compares prompts and answers with the digests of a receipt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from loramux.errors import InvalidRequest
from loramux.receipts.digests import token_digest

PROMPTS, ANSWERS = "prompt_digests", "answer_digests"
MAX_ID = 2**32 - 1
Ids = list[int]


class TextTokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


@dataclass(slots=True)
class Reply:
    """The token ids of a reply (`return_token_ids`), of which a stream has parts in its events."""

    serving: Mapping[str, Any] | None = None
    prompts: list[Ids] = field(default_factory=list)
    answers: dict[int, Ids] = field(default_factory=dict)

    def add(self, value: Mapping[str, Any]) -> None:
        serving = value.get("serving")
        if isinstance(serving, Mapping):
            self.serving = serving
        self._add_prompt(value)
        for choice in value.get("choices") or ():
            if isinstance(choice, Mapping):
                self._add_prompt(choice)
                if is_ids(choice.get("token_ids")):
                    self.answers.setdefault(int(choice["index"]), []).extend(choice["token_ids"])

    def _add_prompt(self, value: Mapping[str, Any]) -> None:
        prompt = value.get("prompt_token_ids")
        if is_ids(prompt) and prompt not in self.prompts:
            self.prompts.append(list(prompt or ()))

    def fits(self) -> bool:
        """Whether the receipt signs the tokens that the reply has; it may have none."""
        assert self.serving is not None
        answers = [token_digest(self.answers[index]) for index in sorted(self.answers)]
        if self.answers and answers != digests_of(self.serving, ANSWERS):
            return False
        return not self.prompts or {*map(token_digest, self.prompts)} == {
            *digests_of(self.serving, PROMPTS)
        }


def replies_of(values: Iterable[Any]) -> list[Reply]:
    """Return the replies with a receipt among JSON values; events of a stream share an id."""
    found: dict[object, Reply] = {}
    for value in values:
        if isinstance(value, Mapping) and isinstance(value.get("id"), str):
            found.setdefault(value["id"], Reply()).add(value)
    return [reply for reply in found.values() if reply.serving is not None]


def is_signed(body: Mapping[str, Any], name: str, text: str, codec: TextTokenizer | None) -> bool:
    """Whether a receipt signs token ids (JSON), or a text, as one of its prompts or answers.

    Of a text only the usual tokenization is tried: a model may write the same text in others.
    """
    known = digests_of(body, name)
    return any(token_digest(ids) in known for ids in _candidates(name, text, codec))


def digests_of(body: Mapping[str, Any], name: str) -> list[Any]:
    known = body.get(name)
    if not isinstance(known, list):
        raise InvalidRequest(
            f"The receipt {body.get('id')} has no {name}: its server is older, or ran with "
            "--receipt-contents metadata."
        )
    return known


def is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= MAX_ID for one in value)


def _candidates(name: str, text: str, codec: TextTokenizer | None) -> list[Ids]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if is_ids(value):
        return [value]
    if codec is None:
        raise InvalidRequest("This is no list of token ids. For a text, add --tokenizer FOLDER.")
    if name == PROMPTS:
        return [codec.encode(text), codec.encode(text, add_special_tokens=False)]
    ids = codec.encode(text, add_special_tokens=False)
    # The end of sequence is a token of the answer, and no part of its text.
    return [ids, *([*ids, end] for end in sorted(codec.special_ids))]
