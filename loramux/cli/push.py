"""`loramux push`: store an adapter folder as an immutable version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args
from urllib.parse import urlsplit

import typer
from rich.console import Console

from loramux.adapters.images.files import is_image_adapter
from loramux.adapters.signature import read_signatures, sign_manifest
from loramux.base.signing import read_private_key
from loramux.cli.console import ByteView, say, size_text
from loramux.cli.doctor import diagnose, measure, show_report
from loramux.cli.registry_options import (
    FAILED,
    DataFlag,
    RegistryFlag,
    RemoteStoreFlag,
    SharedCacheFlag,
    StoreOptions,
    open_library,
    reporting_errors,
)
from loramux.cli.registry_view import show_alias
from loramux.config.fields import parse_bytes
from loramux.config.paths import FETCH_FOLDER, find_data_paths
from loramux.errors import InvalidRequest
from loramux.registry.names import check_alias, parse_push_reference
from loramux.sources.config import FetchLimits, HttpConfig, SourceConfig
from loramux.store.manifest import folder_manifest
from loramux.types.modality import Modality

if TYPE_CHECKING:
    from loramux.store.library import AdapterLibrary, Pushed

MaxSizeFlag = Annotated[str, typer.Option(metavar="SIZE", help="Refuse larger adapters.")]
FetchTimeoutFlag = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", help="Timeout of a download.")
]
FetchWorkersFlag = Annotated[
    int, typer.Option(min=1, help="Number of parts of a file that are downloaded in parallel.")
]
PrivateHostsFlag = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST", help="Hosts of https:// sources whose address may be private."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Limits of a download."""

    data: Path | None
    max_adapter_bytes: int
    timeout_s: float
    num_workers: int
    private_hosts: tuple[str, ...] = ()


@contextmanager
def source_folder(source: str, options: FetchOptions, view: ByteView) -> Iterator[tuple[Path, str]]:
    """Yield the folder of the adapter's files within the context, and the source to record."""
    # Imported here: HTTP clients slow down `--help`.
    from loramux.sources.parse import is_remote, parse_source

    if not is_remote(source):
        yield Path(source), str(Path(source).resolve())
        return
    from loramux.sources.config import read_environment
    from loramux.sources.fetch import Fetcher, fetched

    config = read_environment(os.environ, source_config(source, options))
    parsed = parse_source(source, config)
    view.begin(f"Fetching {parsed}", None)
    area = find_data_paths(data=options.data).store.parent / FETCH_FOLDER
    with fetched(
        Fetcher(config),
        parsed,
        area,
        progress=lambda now: view.set_done(now.received_bytes, now.total_bytes),
    ) as folder:
        yield folder, str(parsed)


def source_config(source: str, options: FetchOptions) -> SourceConfig:
    """Return the source policy of a push: the given host is allowed, a private address needs a
    flag.
    """
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
    """Return the host in an HTTP source, without credentials; these are refused later."""
    if not source.startswith(("http://", "https://")):
        return ()
    try:
        host = urlsplit(source).netloc.rpartition("@")[2]
    # An invalid URL is refused when the source is parsed.
    except ValueError:
        return ()
    return (host,) if host else ()


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Adapter folder, as PEFT saves it, or a .safetensors file for an image model; or "
        "hf:owner/name[@revision][:file], s3://, gs:// or az:// with bucket/folder, "
        "https://host/folder.",
    ),
]
ReferenceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TENANT/NAME[@VERSION]",
        help="Such as alice/refund-flagger@1.4.2. Without a version: the next free one.",
    ),
]
KindFlag = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="What it is for: text or image. Default: image for .safetensors files without an "
        "adapter_config.json.",
    ),
]
PromoteFlag = Annotated[
    str | None, typer.Option(help="Also promote the version, such as --alias prod.")
]
CheckBaseFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL",
        help="First check it on this base model, like `loramux doctor` does.",
    ),
]

SignFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Sign it with this Ed25519 key, which the tenant accepts as a signer."
    ),
]
SignatureFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Signatures in Base64, or a bundle of cosign sign-blob. Default: loramux.sig in the "
        "folder, if there is one.",
    ),
]


def push(  # noqa: PLR0913  (one for each flag)
    source: SourceArgument,
    reference: ReferenceArgument,
    alias: PromoteFlag = None,
    kind: KindFlag = None,
    check_base: CheckBaseFlag = None,
    max_adapter_size: MaxSizeFlag = "8GiB",
    fetch_timeout_s: FetchTimeoutFlag = 1800.0,
    fetch_workers: FetchWorkersFlag = 4,
    private_http_hosts: PrivateHostsFlag = None,
    shared_cache: SharedCacheFlag = None,
    remote_store: RemoteStoreFlag = None,
    sign: SignFlag = None,
    signature: SignatureFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Store an adapter and give it a name and a version.

    Invalid LoRA adapters are refused. The same bytes are stored once for all tenants; a version
    never changes. Exit status 0: stored; 1: refused; 2: wrong usage.

    [bold]Example[/bold]

    loramux push ./my-lora alice/refund-flagger@1.4.2 --alias prod

    loramux push hf:alice/refund-flagger alice/refund-flagger --remote-store s3://adapters/prod
    """
    with reporting_errors():
        parse_push_reference(reference)
        if alias is not None:
            check_alias(alias)
        max_adapter_bytes = parse_bytes(max_adapter_size)
        modality = parse_kind(kind)
    view = ByteView()
    fetch = FetchOptions(
        data=data,
        max_adapter_bytes=max_adapter_bytes,
        timeout_s=fetch_timeout_s,
        num_workers=fetch_workers,
        private_hosts=tuple(private_http_hosts or ()),
    )
    options = StoreOptions(
        shared_cache=shared_cache,
        remote_store=remote_store,
        max_adapter_bytes=max_adapter_bytes,
        sink=view,
    )
    with open_library(registry, data, options) as library:
        with view, source_folder(source, fetch, view) as (folder, name):
            if check_base is not None:
                view.begin("Checking the adapter on its base model", None)
                check_on_base(folder, check_base, modality)
            signatures = given_signatures(folder, sign, signature, modality)
            pushed = library.push(
                folder, reference, source=name, signatures=signatures, modality=modality
            )
        show_pushed(pushed, Console())
        if alias is not None:
            promote_pushed(library, pushed, alias)


def promote_pushed(library: AdapterLibrary, pushed: Pushed, alias: str) -> None:
    name = f"{pushed.tenant}/{pushed.name}"
    state = library.registry.promote(name, pushed.version, alias=alias)
    show_alias(name, state, Console())


def parse_kind(kind: str | None) -> Modality | None:
    """Read --kind; raise InvalidRequest."""
    for modality in get_args(Modality):
        if kind == modality:
            found: Modality = modality
            return found
    if kind is not None:
        raise InvalidRequest(f"--kind is text or image, got {kind!r}.", param="kind")
    return None


def given_signatures(
    folder: Path, key: Path | None, file: Path | None, modality: Modality | None
) -> tuple[str, ...]:
    """Return the signatures of the flags; none: those in the folder count."""
    found = () if file is None else read_signatures(file.parent, file.name)
    if key is None:
        return found
    return (*found, sign_manifest(folder_manifest(folder, modality), read_private_key(key)))


def check_on_base(folder: Path, model: Path, modality: Modality | None = "text") -> None:
    if modality == "image" or (modality is None and is_image_adapter(folder)):
        # Imported here: torch and diffusers take seconds.
        from loramux.diffusion.image_pipeline import ImagePipeline

        ImagePipeline(model).add_adapter("adapter", folder)
        return
    report = diagnose(folder, model, strict_base=False, max_rank=None)
    if report.ok:
        report = measure(report, model)
    if not report.ok or report.warnings:
        show_report(report, Console(stderr=True))
    if not report.ok:
        raise typer.Exit(FAILED)


def show_pushed(pushed: Pushed, console: Console) -> None:
    label = "Pushed   " if pushed.is_new else "Known    "
    say(console, label, f"{pushed.tenant}/{pushed.name}@{pushed.version}", style="bold green")
    say(console, "CID      ", pushed.cid, style="bold")
    if pushed.modality != "text":
        say(console, "Kind     ", pushed.modality, style="bold")
    if pushed.recipe is None:
        say(console, "Size     ", size_text(pushed.size_bytes), style="bold")
    else:
        say(console, "Recipe   ", str(pushed.recipe), style="bold")
    if pushed.signed_by is not None:
        say(console, "Signed by", f" {pushed.signed_by}", style="bold")
