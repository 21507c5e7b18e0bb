"""`LocalDeployment`: each spec as a `loramux serve` process of this machine, behind one address.

Everything runs in an event loop on a thread of its own, so that run() and update() return when
their work is done. A router per model sends requests to the newest process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ipaddress
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future

from loramux.config.connections import ConnectionConfig
from loramux.deploy.local_model import LocalModel
from loramux.deploy.models_app import ModelsApp
from loramux.errors import InvalidRequest, LoramuxError, suggest
from loramux.http_server.browsers import BrowserGuard, default_hosts
from loramux.http_server.serving import DrainingServer, listen, uvicorn_config
from loramux.launch.specs import ModelSpec

_DRAIN_S = 300.0
_LOOK_S = 0.02


class LocalDeployment:
    """The models of specs on this machine."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        host: str,
        port: int,
        on_progress: Callable[[str], None],
    ) -> None:
        """Check the settings of all specs; `port` 0 is any free one."""
        for spec in specs:
            check(spec)
        self._specs = {spec.name: spec for spec in specs}
        self._models: dict[str, LocalModel] = {}
        self._on_progress = on_progress
        self._host, self._port = host, port
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()

    @property
    def url(self) -> str:
        """Where clients connect."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def run(self) -> None:
        """Start all models, and return when they are ready; raise LoramuxError."""
        if self._thread is not None:
            raise LoramuxError("These models run already: update them, or shut them down.")
        ready: Future[None] = Future()
        self._begun.clear()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)), name="loramux-models", daemon=True
        )
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            ready.result()
        except BaseException:
            # Ctrl-C during the start as well.
            self.shutdown()
            raise

    def update(self, spec: ModelSpec) -> None:
        """Change a running model; raise LoramuxError, and the model of before stays."""
        if spec.name not in self._specs:
            raise InvalidRequest(
                f"No deployment named {spec.name!r}. {suggest(spec.name, list(self._specs))}",
                param="name",
            )
        if self._thread is None:
            raise LoramuxError("Nothing runs: call run() first.")
        check(spec)
        work = self._models[spec.name].update(spec)
        asyncio.run_coroutine_threadsafe(work, self._loop).result()
        self._specs[spec.name] = spec

    def shutdown(self) -> None:
        """Finish open streams, and end all processes; without a run, do nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.shutdown)
        self._begun.wait()
        with contextlib.suppress(RuntimeError):
            # The loop has ended by itself where the start failed.
            self._loop.call_soon_threadsafe(self._main.cancel)
        thread.join()

    async def _serve(self, ready: Future[None]) -> None:
        """Serve until this task is cancelled."""
        main = asyncio.current_task()
        assert main is not None
        self._loop, self._main = asyncio.get_running_loop(), main
        self._begun.set()
        try:
            async with self._running():
                ready.set_result(None)
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            ready.cancel()
        except Exception as error:
            ready.set_exception(error)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        # Bound before a model is loaded, so that a port in use fails at once.
        with listen(self._host, self._port) as listener:
            self._port = listener.getsockname()[1]
            async with contextlib.AsyncExitStack() as stack:
                # One after the other: each takes its share of what memory is free.
                for name, spec in self._specs.items():
                    self._models[name] = model = LocalModel(spec, self._on_progress)
                    stack.push_async_callback(model.stop)
                    await model.start()
                if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
                    for model in self._models.values():
                        await model.check_exposure(self._host)
                connections = ConnectionConfig()
                app = BrowserGuard(ModelsApp(self._models), default_hosts(self._host), ("*",))
                config = uvicorn_config(app, connections, log_level="warning", drain_s=_DRAIN_S)
                server = DrainingServer(config, connections, _nothing_to_drain)
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                while not server.started and not serving.done():
                    await asyncio.sleep(_LOOK_S)
                try:
                    yield
                finally:
                    server.handle_exit(signal.SIGTERM, None)
                    await serving


def check(spec: ModelSpec) -> None:
    """Raise InvalidRequest for settings that `loramux serve` would refuse."""
    spec.config  # noqa: B018  (a property that raises)


async def _nothing_to_drain() -> None:
    """Let uvicorn wait for open requests: the models stop after it."""
