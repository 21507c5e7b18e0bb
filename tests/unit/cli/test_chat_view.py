from __future__ import annotations

import io

import msgspec
from rich.console import Console

from loramux.cli.chat import Answer, ChatView, without_controls
from loramux.client.replies import ChatChunk, ModelCard
from tests.scripted_server import chat_chunk, usage_chunk


def chunk(fields: dict[str, object]) -> ChatChunk:
    return msgspec.convert(fields, ChatChunk)


def screen(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=20, force_terminal=terminal, highlight=False), file


def test_text_appears_chunk_by_chunk_as_it_was_made() -> None:
    console, file = screen()
    answer = Answer(console)
    answer.add(chunk(chat_chunk("Long words [bold] ", model="pirate")))
    assert file.getvalue() == "pirate: Long words [bold] "
    answer.add(chunk(chat_chunk(":smile: that are not\n wrapped  at all", "stop")))
    answer.end()
    said = "Long words [bold] :smile: that are not\n wrapped  at all"
    assert file.getvalue() == f"pirate: {said}\n"
    assert answer.text == said


def test_an_answer_cut_at_max_tokens_is_marked() -> None:
    console, file = screen()
    answer = Answer(console)
    answer.add(chunk(chat_chunk("Half", "length")))
    answer.end()
    assert "/max" in file.getvalue()


def test_a_terminal_sees_the_number_of_tokens() -> None:
    for terminal in (True, False):
        console, file = screen(terminal=terminal)
        answer = Answer(console)
        answer.add(chunk(chat_chunk("Hi", "stop")))
        answer.add(chunk(usage_chunk(3, 17)))
        answer.end()
        assert ("17 tokens" in file.getvalue()) == terminal


def test_an_answer_that_never_began_leaves_no_line() -> None:
    console, file = screen()
    Answer(console).end()
    assert file.getvalue() == ""


def test_a_model_cannot_steer_the_terminal() -> None:
    assert without_controls("a\x1b[2J\rb\x07\x9b1m") == "a\\x1b[2J\\rb\\x07\\x9b1m"
    assert without_controls("tab\tline\n👩‍🚀 né") == "tab\tline\n👩‍🚀 né"
    console, file = screen()
    ChatView(console).show_models([ModelCard(id="x\x1b[2J", root=None)], None)
    assert "\x1b" not in file.getvalue()
