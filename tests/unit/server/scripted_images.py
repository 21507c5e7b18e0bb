"""An ImageBackend that draws nothing: it answers with a fixed image, two steps later."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

from loramux.backend.host import Health
from loramux.backend.images import (
    FinishedImage,
    ImageAdapterCard,
    ImageCard,
    ImageForm,
    ImageStats,
    ImageUpdate,
)
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.server.images.names import ImageNames
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.types.image import ImageRequest
from loramux.types.residency import ResidencyView
from tests.unit.server.scripted_backend import ScriptedBackend

IMAGE_CARD = ImageCard(
    name="tiny-flux",
    path="/models/tiny-flux",
    digest="sha256:fedcba9876543210fedcba9876543210",
    dtype="float32",
    pool_bytes=1 << 20,
    family="flux",
    default_size=64,
    size_factor=16,
    default_steps=2,
    max_tokens=4096,
    takes_guidance=True,
)
PNG = b"\x89PNG\r\n\x1a\n"
PICTURE = b64encode(PNG + struct.pack(">I4sII", 13, b"IHDR", 64, 64)).decode()
"""A file whose header says 64x64 pixels."""


class ScriptedImages(ScriptedBackend):
    """Adapters are the files of folders; the names are in a table `names`."""

    def __init__(self, *, registry: RegistryAdapters | None = None) -> None:
        super().__init__(registry=registry)
        self.card = IMAGE_CARD  # type: ignore[assignment]
        self.health = Health.READY
        self.stats: ImageStats = ImageStats()
        self.residency = ResidencyView()
        self.adapters = {}
        self.uses = []
        self.names: ImageNames = ImageNames(self, ("tiny-flux",), registry)
        self.drawn: list[ImageRequest] = []

    async def add_adapter(self, path: str) -> ImageAdapterCard:
        self.added.append(path)
        place = Path(path)
        files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
        if not files:
            raise AdapterNotFound(f"There is no file at {path}.")
        if (place / "adapter_config.json").exists():
            raise AdapterRefused("other_family", f"{path} is for another model.", fix="Use it.")
        folder = place.parent if place.is_file() else place
        card = ImageAdapterCard(
            cid=self.read_cid(folder),
            path=str(files[0]),
            rank=4,
            num_bytes=64,
            num_modules={"transformer": 1},
            trigger_words=("inked",),
        )
        self.adapters[card.cid] = card
        return card

    async def submit(  # type: ignore[override]
        self, request: ImageRequest, form: ImageForm
    ) -> AsyncIterator[ImageUpdate]:
        self.drawn.append(request)
        for cid in request.cids:
            if cid not in self.adapters:
                raise AdapterNotFound(f"No adapter {cid} is registered.")
        for step in range(request.steps):
            yield ImageUpdate(step=step + 1, num_steps=request.steps)
        yield ImageUpdate(step=request.steps, num_steps=request.steps, finished=finished(request))


def finished(request: ImageRequest) -> FinishedImage:
    tokens = request.width // 16 * (request.height // 16) * request.steps
    return FinishedImage(
        data=PNG,
        digest=f"sha256:{abs(hash(request.selection)):064x}"[:71],
        num_steps=request.steps,
        prompt_tokens=len(request.prompt.split()),
        image_tokens=tokens,
        queue_s=0.0,
        denoise_s=0.0,
        decode_s=0.0,
        num_pauses=0,
        max_images=1,
        max_adapters=len(request.selection),
        tier_found="device" if request.selection else None,
    )
