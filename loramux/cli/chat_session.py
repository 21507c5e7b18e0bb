"""The conversation behind `loramux chat`, and its slash commands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from loramux.cli.chat_view import ChatView
from loramux.client.client import Client
from loramux.client.errors import (
    ClientError,
    ConnectFailed,
    IncompleteStream,
    NotFound,
    StreamError,
    Unavailable,
)
from loramux.client.replies import ModelCard
from loramux.errors import suggest

BASE = "base"
COMMANDS = {
    "/adapter": "[NAME|base]  answer with this adapter from now on; without a name, list them",
    "/models": "what the server serves",
    "/system": "[TEXT|-]  set the system message; - removes it, nothing shows it",
    "/temperature": "[X]  0 always takes the likeliest token",
    "/max": "[N]  longest answer in tokens",
    "/retry": "send the last message again if it was not answered",
    "/clear": "forget the conversation; the system message stays",
    "/help": "this list",
    "/quit": "leave (also Ctrl-D)",
}
ALIASES = {"/exit": "/quit", "/q": "/quit", "/temp": "/temperature", "/?": "/help"}
HINTS: dict[type[ClientError], str] = {
    ConnectFailed: "Start it with `loramux serve`, then /retry sends your message again.",
    Unavailable: "It may be back in a moment: /retry sends your message again.",
    NotFound: "/adapter lists what the server has.",
    StreamError: "The answer is not complete and was not kept: /retry asks again.",
    IncompleteStream: "The answer is not complete and was not kept: /retry asks again.",
}
OTHER_HINT = "The conversation is kept: /retry sends your message again."


@dataclass(slots=True)
class ChatSession:
    client: Client
    view: ChatView
    system: str | None = None
    model: str | None = None
    """None: the base."""
    turns: list[dict[str, str]] = field(default_factory=list)
    """Answered messages and their answers, in turn."""
    unanswered: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    known_names: list[str] = field(default_factory=list)
    num_errors: int = 0

    @property
    def prompt(self) -> str:
        return f"{self.model or BASE}> "

    def begin(self, model: str | None) -> bool:
        """False: the server does not have that model. A server that is down may still come up."""
        try:
            cards = self._fetch_models()
        except ClientError as error:
            self._fail(error)
            self.model = model
            return True
        self.view.show_welcome(self.client.base_url, cards)
        return self._choose(model) if model is not None else True

    def take(self, line: str) -> bool:
        """False: leave."""
        line = line.strip()
        if line.startswith("/"):
            return self._command(line)
        if line:
            self.ask(line)
        return True

    def ask(self, text: str) -> None:
        """Streams the answer; only a whole one, or one that the user stopped, is remembered."""
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
        """Whole lines that the line may become."""
        command, space, start = line.partition(" ")
        if not space:
            return [name for name in COMMANDS if name.startswith(command)]
        if command != "/adapter":
            return []
        names = [BASE, *self.known_names]
        return [f"{command} {name}" for name in names if name.startswith(start)]

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
            known = [BASE, *self.known_names]
            self._refuse(f"The server has no adapter {name!r}. {suggest(name, known)}")
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
