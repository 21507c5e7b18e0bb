"""Parses the id of a source and checks that it is allowed, before files are fetched."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from loramux.config.fields import REMOTE_PREFIXES
from loramux.errors import SourceForbidden, SourceNotFound, SourceRefused
from loramux.sources.config import DEFAULT_PORTS, SourceConfig
from loramux.sources.origins.addresses import check_host_allowed, is_host, show_host
from loramux.sources.origins.local import find_under_roots
from loramux.sources.refusals import SourceCode, bad_form
from loramux.sources.source_id import (
    BUCKET_KINDS,
    SourceId,
    SourceKind,
    check_segment,
    has_invalid_characters,
    split_path,
    split_weights,
)
from loramux.types.hub_id import is_repository_part, is_revision

MAX_ID_CHARS = 2048
BUCKETS = {
    SourceKind.S3: re.compile(r"[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]"),
    SourceKind.GCS: re.compile(r"[a-z0-9](?:[a-z0-9_-]|\.(?!\.)){1,61}[a-z0-9]"),
    SourceKind.AZURE: re.compile(r"[a-z0-9](?:[a-z0-9]|-(?!-)){1,61}[a-z0-9]"),
}
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
FORMS = (
    "Valid forms: paths under the allowed roots, hf:owner/name[@revision][:file], s3://, gs:// and "
    "az:// with bucket/folder, and https://host/folder."
)
HUB_FORM = "Write it as hf:owner/name, hf:owner/name@revision or hf:owner/name@revision:file."


def is_remote(text: str) -> bool:
    """Return whether the id names a remote source instead of a local folder."""
    return text.startswith(REMOTE_PREFIXES)


def lasting_name(text: str, folder: Path, config: SourceConfig) -> str:
    """Return the name by which the files of the folder can be fetched again later."""
    return str(parse_source(text, config)) if is_remote(text) else str(folder.resolve())


def parse_source(text: str, config: SourceConfig, *, adapter_source: str | None = None) -> SourceId:
    """Parse an id; `adapter_source` is LoRAX's `hub`, `local`, `s3` or `pbase`, if given."""
    if not text or len(text) > MAX_ID_CHARS:
        raise bad_form(f"An id has 1 to {MAX_ID_CHARS} characters, not {len(text)}.", fix=FORMS)
    if has_invalid_characters(text) or "\\" in text:
        raise bad_form("The id has control or invisible characters, or a backslash.", fix=FORMS)
    parse = find_parser(text, adapter_source)
    source = parse(text, config)
    if source.kind not in config.enabled:
        raise SourceForbidden(
            SourceCode.NOT_ENABLED,
            f"Adapters from {source.kind} are turned off on this server.",
            fix=f"Use one of {', '.join(config.enabled) or 'none'}, or enable {source.kind}.",
        )
    return source


Parser = Callable[[str, SourceConfig], SourceId]


def find_parser(text: str, adapter_source: str | None) -> Parser:
    if adapter_source is not None:
        if adapter_source not in LORAX_PARSERS:
            raise SourceRefused(
                SourceCode.UNKNOWN_SOURCE,
                f"{adapter_source[:40]!r} is not a source of adapters.",
                fix=f"Use one of {', '.join(LORAX_PARSERS)}, or omit it and write a complete id.",
            )
        return LORAX_PARSERS[adapter_source]
    if text.startswith("hf:"):
        return parse_hub
    scheme = SCHEME.match(text)
    if scheme is None:
        return parse_local
    if scheme[1].lower() not in SCHEME_PARSERS:
        raise SourceRefused(
            SourceCode.UNKNOWN_SOURCE, f"{scheme[1][:40]}:// is not a supported scheme.", fix=FORMS
        )
    return SCHEME_PARSERS[scheme[1].lower()]


def parse_local(text: str, config: SourceConfig) -> SourceId:
    folder, weights_name = split_weights(split_path(text.lstrip("/"), what="The path"))
    given = Path("/" if text.startswith("/") else "", *folder)
    root, found = find_under_roots(given, config.allowed_roots)
    if not found.is_dir():
        raise SourceNotFound(f"{given} is not a folder. Give the one with adapter_config.json.")
    return SourceId(
        kind=SourceKind.LOCAL,
        place=str(root),
        folder=found.relative_to(root).parts,
        weights_name=weights_name,
    )


def parse_hub(text: str, config: SourceConfig) -> SourceId:
    """Parse `hf:owner/name[@revision][:file]`; `hf:` may be omitted."""
    plain = text.removeprefix("hf:").removeprefix("//")
    repository, _, path = plain.partition(":")
    name, at, revision = repository.partition("@")
    parts = name.split("/")
    if len(parts) != 2 or not all(is_repository_part(part) for part in parts):
        raise bad_form(f"{name[:120]!r} is not a repository of the hub.", fix=HUB_FORM)
    if at and not is_revision(revision):
        raise bad_form(f"{revision[:120]!r} is not a branch, tag or commit.", fix=HUB_FORM)
    if ":" in plain and not path:
        raise bad_form("There is no file after the colon.", fix=HUB_FORM)
    check_listed(parts[0], config.hub.allowed_owners, what="The hub's owner")
    folder, weights_name = split_weights(split_path(path, what="The file in the repository"))
    return SourceId(
        kind=SourceKind.HUB,
        place=name,
        folder=folder,
        weights_name=weights_name,
        revision=revision or None,
    )


def parse_bucket(text: str, config: SourceConfig) -> SourceId:
    source = parse_bucket_url(text)
    allowed = config.bucket_config(source.kind).allowed_buckets
    check_listed(source.place, allowed, what="The bucket")
    return source


def parse_bucket_url(text: str) -> SourceId:
    """Parse the URL of a bucket that the server's settings name, without the allow list."""
    scheme, _, rest = text.partition("://")
    bucket, _, path = rest.partition("/")
    kind = next((kind for kind in BUCKET_KINDS if kind == scheme.lower()), None)
    if kind is None or BUCKETS[kind].fullmatch(bucket) is None:
        raise bad_form(
            f"{text[:80]!r} does not name a bucket.",
            fix="Write s3://bucket/folder, gs://bucket/folder or az://container/folder.",
        )
    folder, weights_name = split_weights(split_path(path, what="The object's name"))
    return SourceId(kind=kind, place=bucket, folder=folder, weights_name=weights_name)


def check_listed(name: str, allowed: tuple[str, ...] | None, *, what: str) -> None:
    if allowed is not None and name not in allowed:
        raise SourceForbidden(
            SourceCode.NOT_ALLOWED,
            f"{what} {name!r} is not allowed on this server.",
            fix="Use an allowed one, or add it to the list.",
        )


def parse_http(text: str, config: SourceConfig) -> SourceId:
    url = split_url(text)
    scheme, host, port = url.scheme, url.hostname or "", url_port(url)
    check_host_allowed(scheme, host, port, config.http)
    path = url.path.removeprefix("/").removesuffix("/")
    # The unescaped name is checked, because %2e%2e means "..".
    names = tuple(unquote(part, errors="surrogateescape") for part in path.split("/") if path)
    for name in names:
        check_segment(name, what="The URL")
    folder, weights_name = split_weights(names)
    return SourceId(
        kind=SourceKind.HTTP,
        place=f"{scheme}://{show_host(scheme, host, port)}",
        folder=folder,
        weights_name=weights_name,
    )


def split_url(text: str) -> SplitResult:
    """Split an http(s) URL; refuse parts other than scheme, host, port and path."""
    fix = "Write https://host/folder; credentials belong in the server's settings."
    try:
        url = urlsplit(text)
        url_port(url)
    except ValueError as error:
        raise bad_form("This is not a URL.", fix=fix) from error
    if url.scheme not in DEFAULT_PORTS or not is_host(url.hostname or ""):
        raise bad_form("The URL has no valid host.", fix=fix)
    if "@" in url.netloc:
        raise bad_form("A URL must not hold a user name or password.", fix=fix)
    if "?" in text or "#" in text:
        raise bad_form("A URL must have neither a query nor a fragment.", fix=fix)
    return url


def url_port(url: SplitResult) -> int:
    return url.port or DEFAULT_PORTS.get(url.scheme, 0)


def parse_lorax_s3(text: str, config: SourceConfig) -> SourceId:
    """Parse `s3://bucket/folder`, `folder` in the default bucket, or `bucket/folder`."""
    plain = text.removeprefix("s3://")
    if plain == text and config.s3.default_bucket is not None:
        plain = f"{config.s3.default_bucket}/{text}"
    return parse_bucket(f"s3://{plain}", config)


def parse_predibase(text: str, config: SourceConfig) -> SourceId:
    segments = split_path(text, what="The id")
    if len(segments) > 2:
        raise bad_form("An id of pbase is name/version.", fix="Write name/version.")
    if config.http.pbase_url is None:
        raise SourceRefused(
            SourceCode.NOT_ENABLED,
            "Predibase's own adapters (pbase) are not served here.",
            fix="Push the adapter here or to the hub, or configure the URL of a mirror of them.",
        )
    return parse_http("/".join((config.http.pbase_url.rstrip("/"), *segments)), config)


SCHEME_PARSERS: dict[str, Parser] = {
    "hf": parse_hub,
    "s3": parse_bucket,
    "gs": parse_bucket,
    "az": parse_bucket,
    "http": parse_http,
    "https": parse_http,
}
LORAX_PARSERS: dict[str, Parser] = {
    "hub": parse_hub,
    "local": parse_local,
    "s3": parse_lorax_s3,
    "pbase": parse_predibase,
}
