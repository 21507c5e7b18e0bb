"""Conversations with a real HTTP server that answers from a script."""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from loramux.cli.chat import ChatSession, ChatView
from loramux.client.client import Client
from tests.scripted_server import (
    DONE,
    Received,
    Scripted,
    ScriptedServer,
    chat_chunk,
    event,
    model_list,
    reply_error,
    reply_events,
    scripted_server,
    usage_chunk,
)


def respond(request: Received) -> Scripted:
    """Return an answer that says who gives it."""
    if request.path == "/v1/models":
        return model_list("smol", ["pirate", "upper"])
    name = request.fields.get("model") or "smol"
    return reply_events(
        event(chat_chunk("I am ", model=name)),
        event(chat_chunk(f"{name}.", "stop", model=name)),
        event(usage_chunk(3, 2)),
        DONE,
    )


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        server.answer = respond
        yield server


class Chat:
    def __init__(self, url: str) -> None:
        self.output = io.StringIO()
        view = ChatView(Console(file=self.output, width=200, highlight=False))
        self.client = Client(url, max_retries=0)
        self.session = ChatSession(self.client, view)

    def say(self, *lines: str) -> str:
        """Return what the lines showed."""
        before = len(self.output.getvalue())
        for line in lines:
            assert self.session.take(line + "\n")
        return self.output.getvalue()[before:]


@pytest.fixture
def chat(server: ScriptedServer) -> Iterator[Chat]:
    chat = Chat(server.url)
    with chat.client:
        yield chat


def test_the_whole_conversation_is_sent_and_the_model_is_shown(
    server: ScriptedServer, chat: Chat
) -> None:
    assert chat.say("hello") == "smol: I am smol.\n"
    assert chat.say("/system Be brief.", "again?").endswith("smol: I am smol.\n")
    assert server.received[-1].fields["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I am smol."},
        {"role": "user", "content": "again?"},
    ]


def test_the_adapter_changes_within_a_conversation(server: ScriptedServer, chat: Chat) -> None:
    chat.say("hello")
    assert "pirate answers from now on" in chat.say("/adapter pirate")
    assert chat.session.prompt == "pirate> "
    assert chat.say("and you?") == "pirate: I am pirate.\n"
    assert len(server.received[-1].fields["messages"]) == 3
    chat.say("/adapter base")
    assert chat.say("and you?") == "smol: I am smol.\n"
    assert "model" not in server.received[-1].fields


def test_a_sum_of_adapters_answers(server: ScriptedServer, chat: Chat) -> None:
    chat.say("/adapter pirate+0.5*upper")
    chat.say("Hello?")
    assert server.received[-1].fields["model"] == "pirate+0.5*upper"
    assert "no adapter 'nobody'" in chat.say("/adapter pirate+0.5*nobody")
    assert chat.session.completions("/adapter upper+p") == ["/adapter upper+pirate"]


def test_adapters_and_models_are_listed_with_a_mark(chat: Chat) -> None:
    assert chat.say("/adapter") == "* base\n  pirate\n  upper\n"
    chat.say("/adapter upper")
    assert chat.say("/adapter").splitlines() == ["  base", "  pirate", "* upper"]
    listed = chat.say("/models").splitlines()
    assert [line.split()[-4:-2] for line in listed[1:]] == [["of", "smol,"]] * 2
    assert listed[2].startswith("* upper")


def test_a_typing_error_gets_a_suggestion_and_changes_nothing(chat: Chat) -> None:
    chat.say("/adapter upper")
    assert "Did you mean pirate?" in chat.say("/adapter pirat")
    assert "Did you mean /adapter?" in chat.say("/adaptor upper")
    assert "not a number" in chat.say("/max many")
    assert chat.session.model == "upper"
    assert chat.session.options == {}


def test_settings_reach_the_server(server: ScriptedServer, chat: Chat) -> None:
    chat.say("/temperature 0.5", "/max 7", "hello", "/system x", "/system -", "again")
    first, last = (request.fields for request in server.received)
    assert (first["temperature"], first["max_tokens"]) == (0.5, 7)
    assert last["messages"][0]["role"] == "user"
    assert "temperature is 0.5" in chat.say("/temperature")


def test_clear_forgets_and_help_lists(server: ScriptedServer, chat: Chat) -> None:
    chat.say("hello", "/clear", "again")
    assert len(server.received[-1].fields["messages"]) == 1
    assert "/temperature" in chat.say("/help")
    assert chat.say("", "   ") == ""
    assert not chat.session.take("/quit") and not chat.session.take("/exit")


def test_a_restart_of_the_server_keeps_the_conversation() -> None:
    with scripted_server() as server:
        server.answer = respond
        chat = Chat(server.url)
        chat.say("hello")
    with chat.client:
        shown = chat.say("are you there?")
        assert "No server answers" in shown and "loramux serve" in shown
        assert "No server answers" in chat.say("/adapter pirate")
        with scripted_server(port=server.port) as server:
            server.answer = respond
            assert chat.say("/retry") == "smol: I am smol.\n"
            assert [m["content"] for m in server.received[-1].fields["messages"]] == [
                "hello",
                "I am smol.",
                "are you there?",
            ]
        assert "Every message was answered" in chat.say("/retry")


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        (reply_events(event(chat_chunk("Half")), cut=True), "not complete"),
        (reply_events(event(chat_chunk("Half")), event({"error": "died"})), "died"),
        (reply_error(404, "No model pirate."), "/adapter lists"),
        (reply_error(503, "Restarting."), "/retry"),
        (reply_error(400, "Too long."), "/retry"),
    ],
)
def test_an_answer_that_failed_is_shown_as_such_and_not_remembered(
    reply: Scripted, shown: str, server: ScriptedServer, chat: Chat
) -> None:
    server.answer = lambda request: reply
    assert shown in chat.say("hello")
    assert chat.session.turns == []
    server.answer = respond
    chat.say("/retry")
    assert [turn["content"] for turn in chat.session.turns] == ["hello", "I am smol."]


def test_ctrl_c_stops_the_answer_and_tells_the_server(server: ScriptedServer, chat: Chat) -> None:
    endless = reply_events(event(chat_chunk("blah ")), endless=True)
    server.answer = lambda request: endless
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    try:
        shown = chat.say("hello")
    finally:
        timer.join()
    assert shown.endswith("blah \n(stopped)\n")
    assert server.client_left.wait(10)
    assert chat.session.turns[1]["content"].startswith("blah blah")
    server.answer = respond
    assert chat.say("go on") == "smol: I am smol.\n"


def test_completions_know_commands_and_names(chat: Chat) -> None:
    assert chat.session.begin(None)
    assert chat.session.completions("/ma") == ["/max"]
    assert chat.session.completions("/adapter ") == [
        "/adapter base",
        "/adapter smol",
        "/adapter pirate",
        "/adapter upper",
    ]
    assert chat.session.completions("/adapter p") == ["/adapter pirate"]
    assert chat.session.completions("/system p") == []
    assert chat.session.completions("hello") == []


def test_beginning_with_an_unknown_adapter_is_refused(chat: Chat) -> None:
    assert not chat.session.begin("pirat")
    assert "Did you mean pirate?" in chat.output.getvalue()
    assert chat.session.begin("pirate")
    assert chat.session.prompt == "pirate> "
