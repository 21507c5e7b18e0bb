"""A1111's emphasis in prompts: `(fox)`, `((fox))`, `[fox]`, `(fox:1.3)`; `\\(` is the sign itself.

A round bracket multiplies the weight of its words by 1.1, a square one divides it by 1.1, and a
number before the closing round bracket is the factor in place of 1.1. Brackets that stay open act
to the end of the prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from loramux.errors import InvalidRequest

ROUND, SQUARE = 1.1, 1 / 1.1
MAX_DEPTH = 100
MAX_FACTOR = 100.0
_NUMBER = r"[+-]?(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})"
_SIGN = re.compile(rf"\\[\\()\[\]]?|:\s{{0,9}}({_NUMBER})\s{{0,9}}\)|[()\[\]]")
_SQUARE = re.compile(r"(?<!\\)\[([^\[\]]*)\]")
_STEP = re.compile(rf"\s{{0,9}}{_NUMBER}\s{{0,9}}")
_WORDS = re.compile(r"\b(AND|BREAK)\b")


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of a prompt whose words have one weight."""

    text: str
    weight: float = 1.0


def read_emphasis(prompt: str, *, weighs_words: bool, param: str) -> list[Fragment]:
    """Return the fragments of a prompt; raise InvalidRequest for syntax that is not served."""
    for found in _SQUARE.finditer(prompt):
        _, colon, last = found[1].rpartition(":")
        if "|" in found[1] or (colon and _STEP.fullmatch(last)):
            raise InvalidRequest(
                f"{found[0][:100]!r} changes the prompt between steps, which is not supported: "
                "write one of its texts.",
                param=param,
            )
    if word := _WORDS.search(prompt):
        raise InvalidRequest(
            f"{word[0]} in a prompt is not supported: write it in small letters if it is a word.",
            param=param,
        )
    fragments = parse_emphasis(prompt, param=param)
    if not weighs_words and any(one.weight != 1 for one in fragments):
        weighed = next(one for one in fragments if one.weight != 1)
        raise InvalidRequest(
            "Weights of words are not supported by this model: write "
            f"{weighed.text.strip()[:100]!r} without brackets, or \\( and \\) for them as text.",
            param=param,
        )
    return fragments


def parse_emphasis(  # noqa: C901  (one branch for each sign)
    prompt: str, *, param: str = "prompt"
) -> list[Fragment]:
    """Return the fragments of a prompt, without empty ones; neighbours differ in weight."""
    texts: list[str] = []
    weights: list[float] = []
    rounds: list[int] = []
    squares: list[int] = []

    def close(first: int, factor: float) -> None:
        weights[first:] = [weight * factor for weight in weights[first:]]

    def add(text: str) -> None:
        if text:
            texts.append(text)
            weights.append(1.0)

    end = 0
    for sign in _SIGN.finditer(prompt):
        add(prompt[end : sign.start()])
        end = sign.end()
        kind = sign[0]
        if kind in ("(", "["):
            (rounds if kind == "(" else squares).append(len(texts))
            if len(rounds) + len(squares) > MAX_DEPTH:
                raise InvalidRequest(f"More than {MAX_DEPTH} brackets are open.", param=param)
        elif kind == "]" and squares:
            close(squares.pop(), SQUARE)
        elif kind.endswith(")") and kind[0] != "\\" and rounds:
            close(rounds.pop(), ROUND if sign[1] is None else _factor(sign[1], param))
        else:
            add(kind[1:] if kind[0] == "\\" else kind)
    add(prompt[end:])
    for first in rounds:
        close(first, ROUND)
    for first in squares:
        close(first, SQUARE)
    return _joined(texts, weights)


def _factor(text: str, param: str) -> float:
    factor = float(text)
    if abs(factor) > MAX_FACTOR:
        raise InvalidRequest(
            f"The weight of a word is at most {MAX_FACTOR:g}, got {factor:g}.", param=param
        )
    return factor


def _joined(texts: list[str], weights: list[float]) -> list[Fragment]:
    found: list[Fragment] = []
    for text, weight in zip(texts, weights, strict=True):
        if found and found[-1].weight == weight:
            found[-1] = Fragment(found[-1].text + text, weight)
        else:
            found.append(Fragment(text, weight))
    return found or [Fragment("")]
