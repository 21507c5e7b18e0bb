"""What `loramux push` is given: a folder, or an id of another place that is fetched first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from loramux.cli.byte_view import ByteView
from loramux.config.paths import FETCH_FOLDER, find_places
from loramux.sources.config import FetchLimits, HttpConfig, SourceConfig

MaxSizeFlag = Annotated[str, typer.Option(metavar="SIZE", help="Refuse what is larger.")]
FetchTimeoutFlag = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", help="What a download may take.")
]
FetchWorkersFlag = Annotated[
    int, typer.Option(min=1, help="Parts of a file that are downloaded at once.")
]
PrivateHostsFlag = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST", help="Hosts of https:// sources whose address may be private."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    data: Path | None
    max_adapter_bytes: int
    timeout_s: float
    num_workers: int
    private_hosts: tuple[str, ...] = ()


@contextmanager
def source_folder(source: str, options: FetchOptions, view: ByteView) -> Iterator[tuple[Path, str]]:
    """The adapter's files, for as long as the context lasts; and how they can be had again."""
    # Imported here, because its web clients take time that `--help` should not.
    from loramux.sources.parse import is_remote, parse_source

    if not is_remote(source):
        yield Path(source), str(Path(source).resolve())
        return
    from loramux.sources.config import read_environment
    from loramux.sources.fetch import Fetcher, fetched

    config = read_environment(os.environ, source_config(source, options))
    parsed = parse_source(source, config)
    view.begin(f"Fetching {parsed}", None)
    area = find_places(data=options.data).store.parent / FETCH_FOLDER
    with fetched(
        Fetcher(config),
        parsed,
        area,
        progress=lambda now: view.set_done(now.received_bytes, now.total_bytes),
    ) as folder:
        yield folder, str(parsed)


def source_config(source: str, options: FetchOptions) -> SourceConfig:
    """The user has named the host, which allows it; a private address needs a word of its own."""
    return SourceConfig(
        http=HttpConfig(allowed_hosts=typed_hosts(source), private_hosts=options.private_hosts),
        limits=FetchLimits(
            max_file_bytes=options.max_adapter_bytes,
            max_total_bytes=options.max_adapter_bytes,
            timeout_s=options.timeout_s,
            num_workers=options.num_workers,
        ),
    )


def typed_hosts(source: str) -> tuple[str, ...]:
    """Without user and password, which are refused later."""
    if not source.startswith(("http://", "https://")):
        return ()
    try:
        host = urlsplit(source).netloc.rpartition("@")[2]
    # The form of the URL is checked, and refused, by those who parse the source.
    except ValueError:
        return ()
    return (host,) if host else ()
