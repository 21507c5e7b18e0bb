"""The constraints of all sequences of an engine: compiled grammars, and the masks of a step."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loramux.engine.grammar.constraint import Constraint, full_mask
from loramux.engine.grammar.distinct_keys import DistinctKeys
from loramux.engine.grammar.library import WORD_BITS, MaskFiller, Tables, tokenizer_json
from loramux.engine.grammar.open_objects import has_key_patterns, has_open_objects
from loramux.engine.grammar.token_texts import TokenTexts
from loramux.errors import InvalidRequest
from loramux.types.grammar import Grammar
from loramux.types.request import Request
from loramux.types.step import SampleRow, StepPlan

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)


class Compiled(NamedTuple):
    """A grammar that is compiled, whose matcher each choice copies."""

    matcher: LLMatcher
    grammar: Grammar
    texts: TokenTexts | None
    """Those of the tokens, if a key of an object could repeat."""

    def distinct_keys(self) -> DistinctKeys | None:
        if self.texts is None:
            return None
        return DistinctKeys(
            self.texts,
            is_whole=self.grammar.kind == "json_schema" and self.grammar.reasoning is None,
            may_run_out=has_key_patterns(self.grammar),
        )


CompiledGrammar: TypeAlias = Future[Compiled]
"""Raises InvalidRequest if the grammar cannot be compiled."""
_MAX_COMPILED = 256
"""Grammars that are kept; the one that was not used for the longest time goes first."""
_NUM_COMPILERS = 2
OWN_VOCABULARY = (
    "The adapter has a vocabulary of its own, and grammars are made of the tokens of the base: "
    "leave out tools and the grammar of the answer."
)
_MAX_MASK_THREADS = 4


class Constraints:
    """Compiles grammars on threads, makes the constraint of each choice, and fills masks."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._folder: Path | None = None
        self._eos_token_ids: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._tables: Tables | None = None
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._filler: MaskFiller | None = None
        self._words = np.empty((0, 0), dtype=np.int32)

    def use_tokenizer(self, folder: Path, eos_token_ids: Sequence[int]) -> None:
        """Set the tokenizer of grammars; `prepare` or the first grammar reads it."""
        self._folder, self._eos_token_ids = folder, tuple(eos_token_ids)

    def prepare(self) -> None:
        """Read the tokenizer on a thread, so that the first grammar does not wait for it."""
        if self._folder is not None:
            self._pool().submit(self._read_early)

    def check(self, request: Request, vocab_size: int) -> None:
        """Raise InvalidRequest for tokens outside the vocabulary, or without a tokenizer.

        `vocab_size`: that of the adapters of the request.
        """
        params = request.params
        named = {
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": [token for run in params.bad_words_token_ids for token in run],
        }
        for name, token_ids in named.items():
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"{name} has token {token_id}, outside the vocabulary of {vocab_size}.",
                        param=name,
                    )
        if params.grammar is not None:
            Grammar.decode(params.grammar)
            if self._folder is None:
                raise InvalidRequest(
                    "This engine has no tokenizer, which a grammar needs.", param="grammar"
                )
            if vocab_size != self._vocab_size:
                raise InvalidRequest(OWN_VOCABULARY, param="grammar")

    def start(self, grammar: str) -> CompiledGrammar:
        """Return the compiled grammar as a future; a new one is compiled on a thread."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._pool().submit(self._compile, grammar)
            self._compiled[grammar] = found
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found

    def make(
        self, request: Request, compiled: Compiled | None, vocab_size: int
    ) -> list[Constraint]:
        """Make the constraint of each choice."""
        params = request.params
        eos = () if params.ignore_eos else request.eos_token_ids
        own_eos = tuple(token for token in eos if token not in self._eos_token_ids)
        return [
            Constraint(
                params,
                (*eos, *params.stop_token_ids),
                None if compiled is None else compiled.matcher.deep_copy(),
                vocab_size=vocab_size,
                own_eos_ids=own_eos,
                distinct_keys=None if compiled is None else compiled.distinct_keys(),
            )
            for _ in range(params.n)
        ]

    def rows_of(self, plan: StepPlan) -> list[SampleRow]:
        """Return the rows of a plan whose next token depends on a constraint."""
        return [
            row
            for chunk in plan.chunks
            for rows in chunk.rows
            if type(row := rows.use) is SampleRow
            and row.constraint is not None
            and row.is_constrained
        ]

    def fill(self, rows: Iterable[SampleRow]) -> None:
        """Compute the masks of the constrained rows of a step; the next call overwrites them."""
        held: list[tuple[SampleRow, Constraint, LLMatcher]] = []
        for row in rows:
            constraint = row.constraint
            if not isinstance(constraint, Constraint):
                continue
            if constraint.error is not None or constraint.is_complete:
                # The last token ended the sequence after this step was planned.
                constraint.allowed = None
            elif constraint.matcher is None:
                constraint.restrict(full_mask(constraint.vocab_size), row.output_token_ids)
            else:
                held.append((row, constraint, constraint.matcher))
        if not held:
            return
        words = self._buffer(len(held))
        words.fill(-1)
        self._fill_grammars([(matcher, i) for i, (_, _, matcher) in enumerate(held)], words)
        for (row, constraint, _), mask in zip(held, words, strict=True):
            constraint.restrict(mask, row.output_token_ids)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _fill_grammars(
        self, matchers: Sequence[tuple[LLMatcher, int]], words: NDArray[np.int32]
    ) -> None:
        if self._filler is None:
            num_cores = len(os.sched_getaffinity(0))
            self._filler = MaskFiller(min(_MAX_MASK_THREADS, max(1, num_cores // 2)))
        self._filler.fill(matchers, words)

    def _buffer(self, num_rows: int) -> NDArray[np.int32]:
        tables = self._tables
        num_words = -(-self._vocab_size // WORD_BITS) if tables is None else tables.num_words
        if self._words.shape[0] < num_rows or self._words.shape[1] != num_words:
            self._words = np.empty((max(num_rows, 2 * len(self._words)), num_words), dtype=np.int32)
        return self._words[:num_rows]

    def _compile(self, text: str) -> Compiled:
        try:
            tables, grammar = self._read_tables(), Grammar.decode(text)
            is_open = has_open_objects(grammar)
            return Compiled(tables.compile(grammar), grammar, tables.texts if is_open else None)
        except (ValueError, OSError) as error:
            raise InvalidRequest(
                f"The grammar cannot be compiled: {error}", param="grammar"
            ) from error

    def _read_early(self) -> None:
        try:
            self._read_tables()
        except (ValueError, OSError, InvalidRequest) as error:
            _log.warning("answers cannot be constrained by grammars: %s", error)

    def _read_tables(self) -> Tables:
        with self._lock:
            if self._tables is None:
                assert self._folder is not None
                self._tables = Tables(
                    tokenizer_json(self._folder),
                    eos_token_ids=self._eos_token_ids,
                    vocab_size=self._vocab_size,
                )
            return self._tables

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="grammar")
        return self._threads


class HeldRequests:
    """Requests that wait for their grammar, outside of the scheduler's queues."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Request, float, CompiledGrammar]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def add(self, request: Request, arrived_s: float, grammar: CompiledGrammar) -> None:
        self._held[request.request_id] = (request, arrived_s, grammar)

    def discard(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def take_ready(self) -> list[tuple[Request, float, CompiledGrammar]]:
        """Remove and return the requests whose grammar is compiled or has failed."""
        ready = [entry for entry in self._held.values() if entry[2].done()]
        for request, _, _ in ready:
            del self._held[request.request_id]
        return ready

    def wait(self, timeout_s: float) -> None:
        """Wait until one of them is ready."""
        wait(
            [grammar for _, _, grammar in self._held.values()],
            timeout=timeout_s,
            return_when="FIRST_COMPLETED",
        )
