"""Loads versions on servers before an alias moves, and waits until a fleet follows the move."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from loramux.cli.console import say, working
from loramux.client.errors import NotAllowed
from loramux.client.wire import DEFAULT_URL
from loramux.errors import LoramuxError

if TYPE_CHECKING:
    from loramux.client.client import Client
    from loramux.client.replies import AdapterInfo, ReplicaInfo

SETTLE_S = 30.0
_LOOK_S = 0.1


def warm_on_servers(references: Iterable[str], urls: Sequence[str] | None) -> None:
    """Load every version on every server; raise LoramuxError if one cannot."""
    wanted = list(references)
    for url in urls or (DEFAULT_URL,):
        with _client_of(url) as client:
            for reference in wanted:
                with working(f"Loading {reference} on {url}"):
                    entry = _warm(client, reference, url)
                for replica, tier in entry.replicas.items():
                    say(Console(), "Loaded   ", f"{reference} on {replica} ({tier})", style="green")


def wait_until_settled(urls: Sequence[str] | None, revision: int) -> None:
    """Wait until all servers of routers have followed a change, and prints each that has.

    A server by itself has nothing to wait for: its answers follow with the next request.
    """
    for url in urls or (DEFAULT_URL,):
        with _client_of(url) as client:
            _settle(client, url, revision)


def _settle(client: Client, url: str, revision: int) -> None:
    deadline, told = time.monotonic() + SETTLE_S, set[str]()
    while True:
        replicas = _replicas(client)
        for replica in replicas:
            if replica.revision >= revision and replica.name not in told:
                told.add(replica.name)
                say(Console(), "Follows  ", replica.name, style="green")
        behind = [one.name for one in replicas if one.name not in told and one.state == "ready"]
        if not behind:
            return
        if time.monotonic() > deadline:
            raise LoramuxError(
                f"The alias has moved, and these servers of {url} have not followed after "
                f"{SETTLE_S:g} s: {', '.join(behind)}. Do they use this registry?"
            )
        time.sleep(_LOOK_S)


def _replicas(client: Client) -> tuple[ReplicaInfo, ...]:
    try:
        return client.replicas()
    except NotAllowed as error:
        raise LoramuxError(
            "The alias has moved. The router does not tell this key which servers follow: use the "
            "router's own key, or start it with --open-status."
        ) from error
    except LoramuxError:
        # No router.
        return ()


def _warm(client: Client, reference: str, url: str) -> AdapterInfo:
    try:
        return client.warm(reference)
    except LoramuxError as error:
        raise LoramuxError(
            f"{url} could not load {reference}, and nothing was changed: {error} Name the servers "
            "of this registry with --url, or leave --warm out."
        ) from error


@contextmanager
def _client_of(url: str) -> Iterator[Client]:
    # Imported here: it slows down `--help`.
    from loramux.client.client import Client

    with Client(url, api_key=os.environ.get("LORAMUX_API_KEY")) as client:
        yield client
