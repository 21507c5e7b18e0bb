"""How a chat looks on a terminal, and how its lines are read."""

from __future__ import annotations

import io
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from loramux.cli.doctor_view import printable, say
from loramux.client.replies import ChatChunk, ModelCard, Usage

LABEL = "bold green"


class Answer:
    """One answer while it comes in."""

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
            self._console.print(Text("(cut off: the longest answer allowed; see /max)", "yellow"))
        if self._usage is not None and self._console.is_terminal:
            self._console.print(Text(speed_text(self._usage, self._began_s), "dim"))

    def _write(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)


class ChatView:
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
        self.show_note("/adapter NAME switches, /help lists commands, Ctrl-D leaves.")

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
    """Lines of the terminal, with history and tab completion, or of a pipe."""

    def __init__(self, view: ChatView, complete: Callable[[str], list[str]]) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._view = view
        if isinstance(sys.stdin, io.TextIOWrapper):
            # No request can carry bytes that are not text.
            sys.stdin.reconfigure(errors="replace")
        if self.is_interactive:
            enable_editing(complete)

    def read(self, prompt: str) -> str | None:
        """None: the input ended."""
        if not self.is_interactive:
            return sys.stdin.readline() or None
        try:
            return input(prompt) + "\n"
        except EOFError:
            self._view.console.print()
            return None


def enable_editing(complete: Callable[[str], list[str]]) -> None:
    """`input` edits lines and remembers them as soon as readline is loaded."""
    try:
        import readline
    except ImportError:
        return
    readline.set_completer_delims("")
    readline.set_completer(lambda line, state: (complete(line) + [None] * (state + 1))[state])
    readline.parse_and_bind("tab: complete")


def without_controls(text: str) -> str:
    """A model may say anything: escape what could steer the terminal."""
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) == "Cc" and char not in "\n\t"
        else char
        for char in text
    )


def speed_text(usage: Usage, began_s: float) -> str:
    seconds = time.monotonic() - began_s
    return f"{usage.completion_tokens} tokens in {seconds:.1f} s"
