"""Grammars by llguidance: what is checked before a request runs, and what makes its masks.

This is the only module that knows the library; it needs neither torch nor a model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loramux.engine.grammar.token_texts import TokenTexts
from loramux.errors import InvalidRequest
from loramux.types.grammar import Grammar, ReasoningMarks

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

WORD_BITS = 32
_ANY_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
# A space elsewhere is one more choice at every part, in which a small model may go on for ever.
_COMPACT = {"key_separator": ":[ \n]?", "item_separator": ",[ \n]?"}
"""Bounded: a model that writes spaces for ever would otherwise never end."""
_ONE_OF_MARK = "coerce_one_of"
_ONE_OF = (
    "`oneOf` has branches that one value could follow together; use anyOf, or give each branch a "
    "required property with a const of its own"
)
# Each state of a lexer takes up to 2 kB, and a hostile pattern makes as many as it may.
_MAX_LEXER_STATES = 50_000


def import_library() -> Any:
    """Import llguidance; raises InvalidRequest if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequest(
            "Structured output needs the package llguidance: pip install 'loramux[server]'."
        ) from error
    return llguidance


def definition(grammar: Grammar) -> str:
    """Return the grammar as the library reads it."""
    plain = _plain_definition(grammar)
    if grammar.reasoning is None:
        return plain
    (answer,) = json.loads(plain)["grammars"]
    first = {"name": "start", "lark_grammar": _reasoning_rules(grammar.reasoning)}
    return json.dumps({"grammars": [first, {**answer, "name": "answer"}]})


def _reasoning_rules(marks: ReasoningMarks) -> str:
    """Return the rules of reasoning, whitespace, and the answer."""
    begin = f"<[{marks.begin}]>" if isinstance(marks.begin, int) else json.dumps(marks.begin)
    end = r"end: TEXT " + f"<[{marks.end}]>"
    if isinstance(marks.end, str):
        end = r"end[lazy]: /(.|\n)*/ " + json.dumps(marks.end)
    reasoned = f"{begin}? end WS @answer" if marks.is_open else f"({begin} end WS)? @answer"
    return "\n".join(
        ["%llguidance {}", f"start: {reasoned}", end, r"TEXT: /(.|\n)*/", r"WS: /[ \n]{0,8}/"]
    )


def _plain_definition(grammar: Grammar) -> str:
    matcher = import_library().LLMatcher
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return json.dumps({"grammars": [{"lark_grammar": grammar.text}]})
    return str(matcher.grammar_from_json_schema(grammar.text, overrides=schema_options(grammar)))


def schema_options(grammar: Grammar) -> dict[str, bool | str]:
    """Return the options of a schema, as the library names them."""
    options = grammar.options
    chosen: dict[str, bool | str] = {}
    if options.lenient:
        # Otherwise oneOf is only for branches of which a value can follow one at most.
        chosen |= {"lenient": True, "coerce_one_of": True}
    if options.whitespace_pattern is not None:
        chosen["whitespace_pattern"] = options.whitespace_pattern
    elif options.whitespace == "any":
        chosen["whitespace_pattern"] = _ANY_WHITESPACE
    else:
        chosen["whitespace_flexible"] = False
        if options.whitespace == "compact":
            chosen |= _COMPACT
    return chosen


def check_grammar(grammar: Grammar) -> list[str]:
    """Return warnings; raises ValueError, with the reason, for what cannot be enforced."""
    library = import_library()
    is_error, found = library.LLMatcher.validate_grammar_with_warnings(
        definition(grammar), limits=_limits()
    )
    if is_error:
        raise ValueError(_ONE_OF if _ONE_OF_MARK in found[0] else found[0])
    return [warning for warning in found if "no tokenizer" not in warning]


def compile_for_bytes(grammar: Grammar) -> None:
    """Compile a grammar for tokens of a byte each, which takes about as long as for a model's.

    It may fail where a model's would not, as there are no special tokens.
    """
    library = import_library()
    matcher = library.LLMatcher(
        library.LLTokenizer("byte"), definition(grammar), log_level=0, limits=_limits()
    )
    if not matcher.is_error():
        matcher.compute_bitmask()


class Tables:
    """The tokens of a base as the library needs them; threads may share it."""

    def __init__(
        self, tokenizer: dict[str, Any], *, eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        """`tokenizer`: the content of tokenizer.json; `vocab_size`: the width of the logits."""
        library = import_library()
        self._new_matcher = library.LLMatcher
        # A vocabulary that is wider than the logits has tokens that are never generated.
        num_tokens = max(vocab_size, _num_tokens(tokenizer))
        try:
            self._tokenizer: LLTokenizer = library.LLTokenizer(
                json.dumps(tokenizer, ensure_ascii=False),
                n_vocab=num_tokens,
                eos_token=list(eos_token_ids) or None,
            )
        except ValueError as error:
            raise ValueError(_unusable(tokenizer, error)) from error
        self.num_words = -(-num_tokens // WORD_BITS)

    @cached_property
    def texts(self) -> TokenTexts:
        """The bytes of the tokens."""
        tokenizer = self._tokenizer
        return TokenTexts(
            [
                b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
                for token in range(tokenizer.vocab_size)
            ]
        )

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar without the interpreter's lock; raises ValueError."""
        matcher: LLMatcher = self._new_matcher(
            self._tokenizer, definition(grammar), log_level=0, limits=_limits()
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        # The first mask of a lexer takes milliseconds; copies share the lexer.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class MaskFiller:
    """Computes the masks of many matchers at once."""

    def __init__(self, num_threads: int) -> None:
        self._executor = import_library().LLExecutor(num_threads) if num_threads > 1 else None

    def fill(self, matchers: Sequence[tuple[LLMatcher, int]], words: NDArray[np.int32]) -> None:
        """Write the mask of each (matcher, row) to its row of words [rows, words]."""
        num_bytes = words.shape[1] * words.itemsize
        address = words.ctypes.data
        if self._executor is None or len(matchers) == 1:
            for matcher, row in matchers:
                matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
        else:
            self._executor.unsafe_compute_mask_ptr(
                list(matchers), address, num_bytes, words.shape[0]
            )


def tokenizer_json(folder: Path) -> dict[str, Any]:
    """Return tokenizer.json of a model, with the tokens that only its config adds."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        # A folder without it holds a tokenizer that has to be converted.
        from loramux.engine.tokenizer import Tokenizer

        converted: dict[str, Any] = json.loads(Tokenizer(folder).to_json())
        return converted
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    added = content.get("added_tokens") or []
    known = {token["id"] for token in added}
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    extra = [
        {**token, "id": int(token_id)}
        for token_id, token in (config.get("added_tokens_decoder") or {}).items()
        if int(token_id) not in known
    ]
    content["added_tokens"] = sorted([*added, *extra], key=lambda token: int(token["id"]))
    content["truncation"] = content["padding"] = None
    return content


def _unusable(tokenizer: dict[str, Any], error: ValueError) -> str:
    """Return why no grammar can be made of a tokenizer, and what to do."""
    if tokenizer.get("decoder") is None:
        return (
            "the tokenizer.json of the model has no decoder, so that the text of its tokens is not "
            "known. Save the tokenizer with its decoder, such as ByteLevel."
        )
    return f"the tokenizer.json of the model cannot be used for grammars: {error}."


def _num_tokens(content: dict[str, Any]) -> int:
    vocabulary = content["model"]["vocab"]
    # A list of pieces with their scores, or a table of ids.
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = [int(token["id"]) for token in content["added_tokens"]]
    return 1 + max([*ids, *added], default=-1)


def _limits() -> LLParserLimits:
    limits: LLParserLimits = import_library().LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )
    return limits
