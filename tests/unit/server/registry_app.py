"""An application over a real registry and store in a folder, and a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.receipts.issuer import ReceiptIssuer
from loramux.receipts.receipt import Receipt
from loramux.receipts.writer import to_record
from loramux.registry.keys import KeyRights
from loramux.registry.names import parse_name_reference
from loramux.registry.registry import Registry
from loramux.server.app import ServerApp, create_app
from loramux.server.auth.authentication import CredentialAuthenticator, Credentials, TokenVerifier
from loramux.server.context import ServerOptions
from loramux.server.images.context import ImageModel
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.store.library import AdapterLibrary
from loramux.store.store import ContentStore
from loramux.types.access import ALL_SCOPES, KeyScope
from tests.registry_factory import write_empty_registry
from tests.store_factory import CONFIG, write_image, write_tiny
from tests.unit.server.scripted_backend import ScriptedBackend
from tests.unit.server.scripted_images import ScriptedImages

BASE = {**CONFIG, "base_model_name_or_path": "owner/tiny-base"}


class KeptAtOnce:
    """A writer without a thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.receipts: list[Receipt] = []

    def add(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)
        self._registry.add_receipts([to_record(receipt)])

    num_dropped = 0

    def find(self, receipt_id: str) -> Receipt | None:
        return None


@dataclass(frozen=True)
class RegistryApp:
    folder: Path
    app: ServerApp
    backend: ScriptedBackend
    adapters: RegistryAdapters
    writer: KeptAtOnce
    images: ScriptedImages

    @property
    def registry(self) -> Registry:
        return self.adapters.registry

    @property
    def library(self) -> AdapterLibrary:
        return self.adapters.library

    def push(self, reference: str, seed: int, **config: Any) -> str:
        """Return the CID."""
        source = write_tiny(self.folder / f"source-{seed}", seed, config={**BASE, **config})
        pushed = self.library.push(source, reference)
        self.adapters.forget([])
        return pushed.cid

    def push_image(self, reference: str, seed: int) -> str:
        """Return the CID of an adapter of the image model."""
        file = write_image(self.folder / f"image-{seed}.safetensors", seed)
        pushed = self.library.push(file, reference)
        self.adapters.forget([])
        return pushed.cid

    def key(self, tenant: str | None, *scopes: KeyScope, **rights: Any) -> dict[str, str]:
        """Return the header of a new key; without scopes it has all."""
        given = KeyRights(tenant=tenant, scopes=frozenset(scopes) or ALL_SCOPES, **rights)
        new = self.registry.access.create_key(given)
        self.adapters.follow_access()
        return {"authorization": f"Bearer {new.text}"}

    def share(self, reference: str, tenant: str) -> None:
        named = parse_name_reference(reference)
        version = None if named.version is None else str(named.version)
        self.registry.access.share(named.adapter, tenant, version)
        self.adapters.follow_access()


Make = Callable[..., RegistryApp]


def make_registry_app(
    folder: Path,
    *,
    in_streams: bool = True,
    has_images: bool = False,
    tokens: TokenVerifier | None = None,
    **options: Any,
) -> RegistryApp:
    """`has_images`: whether the server has an image model too; `tokens`: of a provider."""
    if not (folder / "registry.db").exists():
        write_empty_registry(folder / "registry.db")
    registry = Registry(folder / "registry.db")
    library = AdapterLibrary(ContentStore(folder / "store"), registry)
    adapters, writer = RegistryAdapters(library), KeptAtOnce(registry)
    backend = ScriptedBackend(registry=adapters)
    images = ScriptedImages(registry=adapters)
    app = create_app(
        backend,
        ServerOptions(**options),
        # Without keys in the registry, every caller is an operator.
        authenticator=CredentialAuthenticator(
            Credentials(
                access=lambda: adapters.access,
                tokens=tokens,
                tenant_header=options.get("tenant_header"),
            )
        ),
        names=backend.names,
        receipts=ReceiptIssuer(in_streams=in_streams, pool_id="pool", writer=writer),
        images=ImageModel(backend=images, names=images.names) if has_images else None,
    )
    return RegistryApp(folder, app, backend, adapters, writer, images)
