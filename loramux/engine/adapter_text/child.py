"""A process that interprets the files of one adapter, for as long as it is asked to."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from loramux.engine.adapter_text import wire
from loramux.engine.adapter_text.description import Description, choose_template
from loramux.engine.adapter_text.files import Base, check_sizes, read_adapter
from loramux.engine.adapter_text.limits import (
    MAX_PROMPT_TOKENS,
    OUT_OF_MEMORY,
    Budget,
    call_memory,
    call_seconds,
    isolate,
    seal,
    start_memory,
    start_seconds,
)
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import InvalidRequest, LoramuxError

# The server has bounded what it sends by the context of the model.
_MAX_REQUEST_BYTES = 2**30


def serve(connection: socket.socket, base: Base, scratch: Path) -> None:
    """Answers requests until the server closes the connection, and ends the process.

    `scratch`: a folder to make, for files that the tokenizer library reads.
    """
    status = 1
    try:
        isolate()
        scratch.mkdir()
        tempfile.tempdir = str(scratch)
        _Child(connection, base).run()
        status = 0
    except wire.Closed:
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


class _Child:
    def __init__(self, connection: socket.socket, base: Base) -> None:
        self._connection = connection
        self._base = base
        self._budget = Budget()
        self._tokenizer: Tokenizer = base.tokenizer
        self._description = Description(is_base=True)

    def run(self) -> None:
        """Answer requests; the first one says whose texts the others are."""
        first = json.loads(self._receive())
        try:
            self._start(first)
        except LoramuxError as error:
            self._budget.stop()
            wire.send_error(self._connection, error)
            return
        self._budget.settle()
        seal()
        wire.send_description(self._connection, self._description)
        while True:
            request = self._receive()
            self._budget.grant(call_seconds(len(request)), call_memory(len(request)))
            try:
                token_ids = self._encode(json.loads(request))
            except InvalidRequest as error:
                self._budget.stop()
                wire.send_error(self._connection, error)
            else:
                self._budget.stop()
                wire.send_ids(self._connection, token_ids)

    def _start(self, first: dict[str, Any]) -> None:
        if "templates" in first:
            # The files were read before, and their vocabulary is that of the base.
            self._description = Description(templates=first["templates"], tokens=first["tokens"])
            return
        folder = Path(first["folder"])
        num_bytes = check_sizes(folder, self._base) + self._base.num_bytes
        self._budget.grant(start_seconds(num_bytes), start_memory(num_bytes))
        self._description, self._tokenizer = read_adapter(
            folder, first["digest"], first["vocab_size"], self._base
        )
        self._budget.stop()

    def _encode(self, request: dict[str, Any]) -> list[int]:
        try:
            token_ids = self._ids_of(request)
        except RecursionError as error:
            raise InvalidRequest("messages are nested too deeply.", param="messages") from error
        except BaseException as error:
            # The library is not Python, and its panics are no Exceptions.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequest(
                f"The tokenizer of this adapter failed on the text: {str(error)[:200]}"
            ) from error
        if len(token_ids) > MAX_PROMPT_TOKENS:
            raise InvalidRequest(
                f"The prompt has {len(token_ids)} tokens in the tokenizer and the chat template "
                f"of this adapter; {MAX_PROMPT_TOKENS} are allowed."
            )
        return token_ids

    def _ids_of(self, request: dict[str, Any]) -> list[int]:
        if "conversation" not in request:
            adds = request["add_special_tokens"]
            if len(request["texts"]) == 1:
                return self._tokenizer.encode(request["texts"][0], add_special_tokens=adds)
            first, second = request["texts"]
            return self._tokenizer.encode_pair(first, second, add_special_tokens=adds)
        arguments = request["arguments"]
        text = self._tokenizer.render(
            request["conversation"],
            {**self._description.tokens, **arguments},
            choose=lambda: choose_template(
                self._description.templates, has_tools=bool(arguments.get("tools"))
            ),
        )
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _receive(self) -> bytes:
        return wire.receive(self._connection, limit=_MAX_REQUEST_BYTES)
