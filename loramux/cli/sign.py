"""`loramux sign`: write the signature of an adapter's content beside its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loramux.adapters.identity import compute_cid
from loramux.adapters.signature import SIGNATURE_NAME, sign_manifest, signed_bytes
from loramux.base.signing import key_id_of, read_private_key
from loramux.cli.console import say
from loramux.cli.registry_options import reporting_errors
from loramux.errors import InvalidRequest
from loramux.store.manifest import folder_manifest


def sign(
    folder: Annotated[Path, typer.Argument(help="Adapter folder, as PEFT saves it.")],
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Ed25519 key in PEM: loramux receipts keygen FILE."),
    ] = None,
    print_manifest: Annotated[
        bool,
        typer.Option(
            "--print-manifest",
            help="Print the bytes to sign, for cosign sign-blob or openssl, and sign nothing.",
        ),
    ] = False,
) -> None:
    """Sign an adapter; the signature is added to loramux.sig in its folder.

    It covers the content id (CID), and so weights, configuration and tokenizer files.

    [bold]Example[/bold]

    loramux sign ./my-lora --key acme.pem

    loramux sign ./my-lora --print-manifest > m.json && cosign sign-blob --key cosign.key m.json
    """
    with reporting_errors():
        if (key is None) != print_manifest:
            raise InvalidRequest("Give --key FILE, or --print-manifest.")
        manifest = folder_manifest(folder)
        if key is None:
            typer.echo(signed_bytes(manifest), nl=False)
            return
        private = read_private_key(key)
        signature = sign_manifest(manifest, private)
        place = folder if folder.is_dir() else folder.parent
        with (place / SIGNATURE_NAME).open("a", encoding="ascii") as file:
            file.write(signature + "\n")
    console = Console()
    say(console, "Signed   ", compute_cid(manifest), style="bold green")
    say(console, "Key      ", key_id_of(private.public_key()), style="bold")
