"""An application that draws with a tiny FLUX pipeline, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from starlette.testclient import TestClient

from loramux.backend.text import TextBackend
from loramux.config.images import ImageConfig
from loramux.config.serve import ServeConfig
from loramux.diffusion.adapter import ImageAdapter
from loramux.diffusion.async_engine import AsyncImageEngine
from loramux.launch.images import engine_options
from loramux.server.app import create_app
from loramux.server.context import ServerOptions
from loramux.server.images.context import ImageModel
from loramux.server.images.names import ImageNames
from loramux.server.naming.registry_adapters import RegistryAdapters
from tests.image_factory import make_pipeline, peft_tensors


class ImageClient(TestClient):
    """A client of the application, with what is behind it."""

    engine: AsyncImageEngine
    names: ImageNames

    def add(self, name: str, path: Path, weight: float = 1.0) -> None:
        self.names.bind(name, self.portal.call(self.engine.add_adapter, str(path)))
        self.names.set_weight(name, weight)


def make_engine(folder: Path, *, family: str = "flux", **settings: Any) -> AsyncImageEngine:
    """Return an engine that has not started, with a model of the folder, where it is saved if
    needed.
    """
    model = folder / family
    if not model.exists():
        make_pipeline(family).save_pretrained(model)
    images = ImageConfig(image_model=str(model), **settings)
    return AsyncImageEngine(engine_options(ServeConfig(images=images)))


@contextmanager
def image_client(
    folder: Path,
    *,
    text: TextBackend | None = None,
    registry: RegistryAdapters | None = None,
    options: ServerOptions | None = None,
    started: bool = True,
    family: str = "flux",
    **more: Any,
) -> Iterator[ImageClient]:
    """`family`: the name of the model and of its folder; `more`: arguments of create_app()."""
    engine = make_engine(folder, family=family)
    names = ImageNames(engine, (family,), registry)
    app = create_app(
        text,
        options or ServerOptions(),
        images=ImageModel(backend=engine, names=names),
        **more,
    )
    with ImageClient(app) as client:
        client.engine, client.names = engine, names
        if started:
            client.portal.call(engine.start)
        yield client
        client.portal.call(lambda: engine.close(drain_s=1.0))


def save_adapters(folder: Path, adapters: Mapping[str, ImageAdapter]) -> dict[str, Path]:
    """Write each adapter as a file of diffusers."""
    paths = {name: folder / f"{name}.safetensors" for name in adapters}
    for name, adapter in adapters.items():
        save_file(peft_tensors(adapter), paths[name])
    return paths
