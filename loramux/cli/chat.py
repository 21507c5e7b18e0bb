"""`loramux chat`: a conversation with a running server."""

from __future__ import annotations

import io
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from loramux.cli.console import printable, say
from loramux.client.client import Client
from loramux.client.errors import (
    ClientError,
    ConnectFailed,
    IncompleteStream,
    NotFound,
    StreamError,
    Unavailable,
)
from loramux.client.replies import ChatChunk, ModelCard, Usage
from loramux.client.wire import DEFAULT_URL
from loramux.errors import InvalidRequest, suggest
from loramux.types.composition import parse_sum

LABEL = "bold green"


class Answer:
    """Prints one answer while it streams."""

    def __init__(self, console: Console) -> None:
        self.text = ""
        self._console = console
        self._model: str | None = None
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._began_s = time.monotonic()

    def add(self, chunk: ChatChunk) -> None:
        if self._model is None:
            self._model = chunk.model
            self._write(Text(f"{printable(chunk.model)}: ", LABEL))
        if chunk.text:
            self.text += chunk.text
            self._write(Text(without_controls(chunk.text)))
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason

    def end(self, *, stopped: bool = False) -> None:
        if self._model is not None:
            self._console.print()
        if stopped:
            self._console.print(Text("(stopped)", "yellow"))
        elif self._finish_reason == "length":
            self._console.print(Text("(cut off at max_tokens; see /max)", "yellow"))
        if self._usage is not None and self._console.is_terminal:
            self._console.print(Text(speed_text(self._usage, self._began_s), "dim"))

    def _write(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)


class ChatView:
    """Prints notes, errors, lists and answers of a chat."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def begin_answer(self) -> Answer:
        return Answer(self.console)

    def show_welcome(self, url: str, cards: Sequence[ModelCard]) -> None:
        if not self.console.is_terminal:
            return
        names = [card.id for card in cards if card.is_adapter]
        say(self.console, "Connected to ", url, style="bold")
        say(self.console, "Adapters: ", ", ".join(names) or "none", style="bold")
        self.show_note("/adapter NAME switches, /help lists commands, Ctrl-D quits.")

    def show_note(self, text: str) -> None:
        self.console.print(Text(printable(text), "dim"), soft_wrap=True)

    def show_error(self, message: str, *, hint: str = "") -> None:
        say(self.console, "error: ", message, style="bold red")
        if hint:
            self.show_note(hint)

    def show_adapters(self, cards: Sequence[ModelCard], model: str | None) -> None:
        for name in ["base", *(card.id for card in cards if card.is_adapter)]:
            is_current = name == (model or "base")
            say(self.console, "* " if is_current else "  ", name, style=LABEL)

    def show_models(self, cards: Sequence[ModelCard], model: str | None) -> None:
        for card in cards:
            is_current = card.id == model or (model is None and card is cards[0])
            kind = f"adapter of {card.parent}" if card.is_adapter else "base"
            facts = f"{card.id}  ({kind}, from {card.root})"
            say(self.console, "* " if is_current else "  ", facts, style=LABEL)

    def show_help(self, commands: Mapping[str, str]) -> None:
        for name, text in commands.items():
            say(self.console, f"{name:<13}", text, style="bold")


class LineReader:
    """Reads lines from the terminal, with history and tab completion, or from a pipe."""

    def __init__(self, view: ChatView, complete: Callable[[str], list[str]]) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._view = view
        if isinstance(sys.stdin, io.TextIOWrapper):
            # A request cannot contain bytes that are not valid text.
            sys.stdin.reconfigure(errors="replace")
        if self.is_interactive:
            enable_editing(complete)

    def read(self, prompt: str) -> str | None:
        """Return the next line, or None at the end of the input."""
        if not self.is_interactive:
            return sys.stdin.readline() or None
        try:
            return input(prompt) + "\n"
        except EOFError:
            self._view.console.print()
            return None


def enable_editing(complete: Callable[[str], list[str]]) -> None:
    """Load readline, which gives `input` line editing and history."""
    try:
        import readline
    except ImportError:
        return
    readline.set_completer_delims("")
    readline.set_completer(lambda line, state: (complete(line) + [None] * (state + 1))[state])
    readline.parse_and_bind("tab: complete")


def without_controls(text: str) -> str:
    """Escape control characters: a model may generate terminal sequences."""
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) == "Cc" and char not in "\n\t"
        else char
        for char in text
    )


def speed_text(usage: Usage, began_s: float) -> str:
    seconds = time.monotonic() - began_s
    return f"{usage.completion_tokens} tokens in {seconds:.1f} s"


BASE = "base"
COMMANDS = {
    "/adapter": "[NAME|a+0.3*b|base]  use it from now on; without a name, list the adapters",
    "/models": "list the models of the server",
    "/system": "[TEXT|-]  set the system message; - removes it, no argument shows it",
    "/temperature": "[X]  0 always selects the most likely token",
    "/max": "[N]  maximum length of an answer in tokens",
    "/retry": "send the last message again if it was not answered",
    "/clear": "forget the conversation; the system message stays",
    "/help": "this list",
    "/quit": "quit (also Ctrl-D)",
}
ALIASES = {"/exit": "/quit", "/q": "/quit", "/temp": "/temperature", "/?": "/help"}
HINTS: dict[type[ClientError], str] = {
    ConnectFailed: "Start it with `loramux serve`, then /retry sends your message again.",
    Unavailable: "It may be back in a moment: /retry sends your message again.",
    NotFound: "/adapter lists the adapters of the server.",
    StreamError: "The answer is not complete and was not kept: /retry asks again.",
    IncompleteStream: "The answer is not complete and was not kept: /retry asks again.",
}
OTHER_HINT = "The conversation is kept: /retry sends your message again."


@dataclass(slots=True)
class ChatSession:
    """The conversation with a server, and its slash commands."""

    client: Client
    view: ChatView
    system: str | None = None
    model: str | None = None
    """Name of the model; None: the base."""
    turns: list[dict[str, str]] = field(default_factory=list)
    """Messages and their answers, alternating."""
    unanswered: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    known_names: list[str] = field(default_factory=list)
    num_errors: int = 0

    @property
    def prompt(self) -> str:
        return f"{self.model or BASE}> "

    def begin(self, model: str | None) -> bool:
        """Connect and choose the model; False if the server does not have it.

        A server that is down is no failure: it may come up later.
        """
        try:
            cards = self._fetch_models()
        except ClientError as error:
            self._fail(error)
            self.model = model
            return True
        self.view.show_welcome(self.client.base_url, cards)
        return self._choose(model) if model is not None else True

    def take(self, line: str) -> bool:
        """Handle a line; False ends the chat."""
        line = line.strip()
        if line.startswith("/"):
            return self._command(line)
        if line:
            self.ask(line)
        return True

    def ask(self, text: str) -> None:
        """Stream an answer; it joins the conversation if it is complete or was stopped."""
        self.unanswered = None
        answer = self.view.begin_answer()
        stream = self.client.stream_chat(self._messages(text), model=self.model, **self.options)
        try:
            with closing(stream):
                for chunk in stream:
                    answer.add(chunk)
        except KeyboardInterrupt:
            answer.end(stopped=True)
        except ClientError as error:
            answer.end()
            self.unanswered = text
            self._fail(error)
            return
        else:
            answer.end()
        if answer.text:
            self.turns += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer.text},
            ]

    def set_option(self, name: str, value: object) -> None:
        if value is not None:
            self.options[name] = value

    def completions(self, line: str) -> list[str]:
        """Complete lines that begin with this one."""
        command, space, start = line.partition(" ")
        if not space:
            return [name for name in COMMANDS if name.startswith(command)]
        if command != "/adapter":
            return []
        before, operator, last = start.rpartition("+")
        names = self.known_names if operator else [BASE, *self.known_names]
        before += operator
        return [f"{command} {before}{name}" for name in names if name.startswith(last)]

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": text}]

    def _fetch_models(self) -> list[ModelCard]:
        cards = self.client.models()
        self.known_names = [card.id for card in cards]
        return cards

    def _fail(self, error: ClientError) -> None:
        self.num_errors += 1
        hint = next((text for kind, text in HINTS.items() if isinstance(error, kind)), OTHER_HINT)
        self.view.show_error(str(error), hint=hint if self.unanswered or error.status else "")

    def _command(self, line: str) -> bool:
        word, _, argument = line.partition(" ")
        name = ALIASES.get(word, word)
        if name == "/quit":
            return False
        actions: dict[str, Callable[[str], None]] = {
            "/adapter": self._adapter,
            "/models": lambda _: self.view.show_models(self._fetch_models(), self.model),
            "/system": self._system,
            "/temperature": lambda text: self._number("temperature", float, text),
            "/max": lambda text: self._number("max_tokens", int, text),
            "/retry": lambda _: self._retry(),
            "/clear": lambda _: self._clear(),
            "/help": lambda _: self.view.show_help(COMMANDS),
        }
        if name not in actions:
            self._refuse(f"There is no command {word}. {suggest(word, list(COMMANDS))}")
            return True
        try:
            actions[name](argument.strip())
        except ClientError as error:
            self._fail(error)
        return True

    def _refuse(self, message: str) -> None:
        self.num_errors += 1
        self.view.show_error(message)

    def _adapter(self, name: str) -> None:
        cards = self._fetch_models()
        if not name:
            self.view.show_adapters(cards, self.model)
        elif self._choose(name):
            self.view.show_note(f"{self.model or BASE} answers from now on.")

    def _choose(self, name: str) -> bool:
        if name != BASE and name not in self.known_names:
            for part, _ in parse_sum(name) or [(name, 1.0)]:
                if part not in self.known_names:
                    known = [BASE, *self.known_names]
                    self._refuse(f"The server has no adapter {part!r}. {suggest(part, known)}")
                    return False
        self.model = None if name == BASE else name
        return True

    def _system(self, text: str) -> None:
        if text:
            self.system = None if text == "-" else text
        self.view.show_note(f"System message: {self.system or 'none'}")

    def _number(self, name: str, kind: type[int] | type[float], text: str) -> None:
        if text:
            try:
                value = kind(text)
            except ValueError:
                self._refuse(f"{text!r} is not a number. Write /{name.split('_')[0]} 1")
                return
            self.options[name] = value
        self.view.show_note(f"{name} is {self.options.get(name, 'the server’s default')}.")

    def _retry(self) -> None:
        if self.unanswered is None:
            self.view.show_note("Every message was answered.")
        else:
            self.ask(self.unanswered)

    def _clear(self) -> None:
        self.turns.clear()
        self.unanswered = None
        self.view.show_note("The conversation is forgotten.")


def chat(
    url: Annotated[str, typer.Option(help="URL of the server.")] = DEFAULT_URL,
    model: Annotated[
        str | None,
        typer.Option(
            help="Adapter, sum such as a+0.3*b, or model to start with. Default: the base."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 always selects the most likely token.")
    ] = 0.0,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")
    ] = 512,
    api_key: Annotated[
        str | None, typer.Option(envvar="LORAMUX_API_KEY", help="Sent as a bearer token.")
    ] = None,
) -> None:
    """Chat with a running server; answers appear as they are generated.

    /adapter NAME switches the adapter within a conversation, /help lists the other commands.
    Ctrl-C stops an answer, Ctrl-D quits. Lines may also be piped in; the exit status is then 1 if
    one of them was not answered.
    """
    view = ChatView(Console(highlight=False))
    try:
        client = Client(url, api_key=api_key)
    except InvalidRequest as error:
        view.show_error(str(error))
        raise typer.Exit(2) from error
    with client:
        session = ChatSession(client, view, system=system)
        session.set_option("temperature", temperature)
        session.set_option("max_tokens", max_tokens)
        if not session.begin(model):
            raise typer.Exit(1)
        reader = LineReader(view, session.completions)
        converse(session, reader, view)
    raise typer.Exit(1 if session.num_errors and not reader.is_interactive else 0)


def converse(session: ChatSession, reader: LineReader, view: ChatView) -> None:
    """Read and answer lines until the input ends or /quit."""
    while True:
        try:
            line = reader.read(session.prompt)
            if line is None or not session.take(line):
                return
        except KeyboardInterrupt:
            view.show_note("Ctrl-D or /quit ends the chat.")
