"""`ModelServer`: specs of models, served on this machine or on Ray."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from loramux.errors import InvalidRequest
from loramux.launch.specs import ModelSpec

if TYPE_CHECKING:
    from loramux.deploy.local_server import LocalDeployment
    from loramux.deploy.ray_server import RayDeployment

HOST, PORT = "127.0.0.1", 8000


class ModelServer:
    """Models behind one address, on this machine or on a Ray cluster.

    As a context manager it shuts down at the end of the block.
    """

    def __init__(
        self,
        models: ModelSpec | Sequence[ModelSpec],
        host: str | None = None,
        port: int | None = None,
        *,
        on_ray: bool = False,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Take the specs of all models; nothing starts before run().

        `host`, `port`: where clients connect, by default 127.0.0.1:8000, with `on_ray` those of the
        spec's fleet. `on_ray`: deploy one model on the Ray cluster of this process.
        """
        specs = [models] if isinstance(models, ModelSpec) else list(models)
        _check(specs)
        self._deployment = _deployment(specs, host, port, on_ray, on_progress)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self._deployment.url

    def run(self) -> None:
        """Start all models, and return when they are ready; raise LoramuxError."""
        self._deployment.run()

    def update(self, spec: ModelSpec) -> None:
        """Change the running model of this name into another spec, and return when it is done.

        Adapters, pins and limits of text change in place. For everything else a new process starts
        beside the old one, which then finishes its streams. A spec that cannot be served raises
        LoramuxError, and the old one stays.
        """
        self._deployment.update(spec)

    def wait(self) -> None:
        """Serve until SIGTERM or Ctrl-C, then shut down."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                signal.pause()
        self.shutdown()

    def shutdown(self) -> None:
        """Finish open streams, and end all processes."""
        self._deployment.shutdown()

    def __enter__(self) -> Self:
        self.run()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


def _check(specs: Sequence[ModelSpec]) -> None:
    names = [spec.name for spec in specs]
    if not names:
        raise InvalidRequest("models must have one spec or more.", param="models")
    if len(set(names)) < len(names):
        raise InvalidRequest(f"The names of models must differ, got {names}.", param="models")


def _deployment(
    specs: Sequence[ModelSpec],
    host: str | None,
    port: int | None,
    on_ray: bool,
    on_progress: Callable[[str], None],
) -> LocalDeployment | RayDeployment:
    # Imported here: specs are also read where neither a server nor Ray is installed.
    try:
        if on_ray:
            from loramux.deploy.ray_server import RayDeployment

            return RayDeployment(specs, host=host, port=port, on_progress=on_progress)
        from loramux.deploy.local_server import LocalDeployment

        return LocalDeployment(specs, host=host or HOST, port=port or PORT, on_progress=on_progress)
    except ModuleNotFoundError as error:
        extra = "ray" if on_ray else "server,router"
        raise InvalidRequest(
            f"{error.name} is not installed. Run: pip install 'loramux[{extra}]'"
        ) from error
