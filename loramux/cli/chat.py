"""`loramux chat`: a conversation with a running server."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from loramux.cli.chat_session import ChatSession
from loramux.cli.chat_view import ChatView, LineReader
from loramux.client.client import Client
from loramux.client.wire import DEFAULT_URL
from loramux.errors import InvalidRequest


def chat(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Adapter or model to begin with. Default: the base.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 always takes the likeliest token.")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    api_key: Annotated[
        str | None, typer.Option(envvar="LORAMUX_API_KEY", help="Sent as a bearer token.")
    ] = None,
) -> None:
    """Chat with a running server; answers appear as they are generated.

    /adapter NAME switches the adapter in the middle of a conversation, /help lists the other
    commands. Ctrl-C stops an answer, Ctrl-D leaves. Lines may also be piped in; the exit status is
    then 1 if one of them was not answered.
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
    """Until the input ends or a command leaves."""
    while True:
        try:
            line = reader.read(session.prompt)
            if line is None or not session.take(line):
                return
        except KeyboardInterrupt:
            view.show_note("Ctrl-D or /quit leaves.")
