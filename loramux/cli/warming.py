"""Running servers load what an alias is about to name, before it moves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.cli.registry_options import working
from loramux.client.wire import DEFAULT_URL
from loramux.errors import LoramuxError

if TYPE_CHECKING:
    from loramux.client.client import Client

WarmFlag = Annotated[
    bool,
    typer.Option(
        "--warm",
        help="First load it on the servers of --url, so that nobody waits for it; if one of them "
        "cannot, the alias stays.",
    ),
]
UrlsFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="URL",
        help=f"With --warm: where a server listens; may be given several times. Default: "
        f"{DEFAULT_URL}.",
        show_default=False,
    ),
]


def warm_on_servers(references: Iterable[str], urls: Sequence[str] | None) -> None:
    # Imported here, because it takes time that `--help` should not.
    from loramux.client.client import Client

    wanted = list(references)
    for url in urls or (DEFAULT_URL,):
        with Client(url, api_key=os.environ.get("LORAMUX_API_KEY")) as client:
            for reference in wanted:
                with working(f"Loading {reference} on {url}"):
                    warm(client, reference, url)


def warm(client: Client, reference: str, url: str) -> None:
    try:
        client.warm(reference)
    except LoramuxError as error:
        raise LoramuxError(
            f"{url} could not load {reference}, and nothing was changed: {error} Name the servers "
            "of this registry with --url, or leave --warm out."
        ) from error
