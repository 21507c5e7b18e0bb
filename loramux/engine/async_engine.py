"""Runs the engine in a process of its own, and starts a new one whenever it dies."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from loramux.backend import (
    AdapterUse,
    Delta,
    EngineStats,
    Health,
    ModelCard,
    failure_of,
)
from loramux.config.engine import EngineConfig
from loramux.engine.messages import (
    Abort,
    Add,
    Command,
    Events,
    Finish,
    ListUses,
    Pin,
    Prewarm,
    Refused,
    Register,
    Remove,
    Reply,
    Shutdown,
    Start,
    Verify,
    decode_error,
)
from loramux.engine.outputs import OutputCollector, RequestStream
from loramux.engine.process import EngineProcess, OnProgress
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import AdapterNotFound, EngineBusy, EngineStopped, LoramuxError
from loramux.types.adapter import AdapterCard
from loramux.types.request import FinishReason, Request, Selection
from loramux.types.sampling import SamplingParams

_log = logging.getLogger(__name__)
_RESTART_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncEngineOptions:
    model: Path
    config: EngineConfig
    served_name: str | None = None
    """Name of the base in requests; None: the model's own name."""
    max_queue: int = 4096
    """Open requests beside those of a full batch; more are refused with EngineBusy."""
    max_tokens: int | None = None
    """Limit of the tokens of all open requests: prompts and the longest possible answers."""


class StatsView:
    """The newest statistics of an engine, put together from its updates."""

    def __init__(self) -> None:
        self.current = EngineStats()
        self._resident: dict[str, None] = {}

    def update(self, reply: Events) -> None:
        if reply.residency is not None:
            if reply.residency.is_full:
                self._resident.clear()
            for cid in reply.residency.evicted:
                self._resident.pop(cid, None)
            self._resident |= dict.fromkeys(reply.residency.loaded)
        if reply.stats is not None:
            self.current = replace(reply.stats, resident_adapters=tuple(self._resident))


class AsyncEngine:
    """Implements loramux.backend.TextBackend over an engine in another process."""

    def __init__(
        self, options: AsyncEngineOptions, *, on_progress: OnProgress = lambda what, share: None
    ) -> None:
        self._options = options
        self._on_progress = on_progress
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._registration: asyncio.Task[None] | None = None
        self._streams: dict[str, RequestStream] = {}
        self._card: ModelCard | None = None
        self._codec: Tokenizer | None = None
        self._adapters: dict[str, AdapterCard] = {}
        self._health = Health.STARTING
        self._stats = StatsView()
        self.num_restarts = 0

    @property
    def health(self) -> Health:
        return self._health

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise EngineStopped("The engine has not started yet.")
        return self._card

    @property
    def codec(self) -> Tokenizer:
        assert self._codec is not None, "start() first"
        return self._codec

    @property
    def stats(self) -> EngineStats:
        return self._stats.current

    @property
    def adapters(self) -> Mapping[str, AdapterCard]:
        return self._adapters

    @property
    def engine_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        await self._open_process()
        self._supervisor = asyncio.create_task(self._supervise())
        self._codec = await asyncio.to_thread(Tokenizer, Path(self.card.tokenizer_folder))
        self._health = Health.READY

    async def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Yields the deltas of all choices; closing the iterator early aborts the request."""
        stream = self._open_stream(request)
        try:
            while True:
                for delta in await stream.take():
                    if delta.finish_reason is FinishReason.ERROR:
                        raise failure_of(delta)
                    yield delta
                if stream.is_finished:
                    return
        finally:
            if self._streams.pop(request.request_id, None) is not None and not stream.is_finished:
                self._send(Abort(request_id=request.request_id))

    async def add_adapter(self, path: str) -> AdapterCard:
        card = await self._register(path)
        self._adapters[card.cid] = card
        return card

    async def remove_adapter(self, cid: str) -> None:
        self._require_adapter(cid)
        del self._adapters[cid]
        self._send(Remove(cid=cid))

    async def prewarm(self, cids: Sequence[str], *, num_busiest: int = 0) -> None:
        self._send(Prewarm(cids=tuple(cids), num_busiest=num_busiest))

    async def pin_adapter(self, cid: str, pinned: bool) -> None:
        await self._running.call(lambda call_id: Pin(call_id=call_id, cid=cid, is_pinned=pinned))

    async def adapter_uses(self) -> Sequence[AdapterUse]:
        answer = await self._running.call(lambda call_id: ListUses(call_id=call_id))
        return answer.uses or []

    async def probe(self, timeout_s: float) -> dict[str, float]:
        """Generates a token on the base, and reads an adapter and generates a token with it.

        Returns the seconds of each check, or raises.
        """
        seconds = {}
        async with asyncio.timeout(timeout_s):
            began = time.monotonic()
            await self._generate_one_token(())
            seconds["generate_s"] = time.monotonic() - began
            if self._adapters:
                cid = next(iter(self._adapters))
                began = time.monotonic()
                await self._running.call(lambda call_id: Verify(call_id=call_id, cid=cid))
                await self._generate_one_token(((cid, 1.0),))
                seconds["adapter_s"] = time.monotonic() - began
        return seconds

    async def close(self, *, drain_s: float) -> None:
        if self._health is Health.STOPPED:
            return
        self._health = Health.DRAINING
        deadline = time.monotonic() + drain_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._health = Health.STOPPED
        if self._supervisor is not None:
            self._supervisor.cancel()
        self._fail_all(EngineStopped("The server is shutting down."))
        if self._process is not None:
            self._process.send(Shutdown())
            await self._process.wait(timeout_s=3.0)

    async def _open_process(self) -> None:
        options = self._options
        settings = asdict(options.config)
        first = self._card
        if first is not None:
            # A restarted engine must not fall back to another device.
            settings["device"] = first.device
        start = Start(model=str(options.model), settings=settings)
        self._process = await EngineProcess.open(start, self._on_progress)
        card = self._process.card
        self._card = replace(
            card,
            name=options.served_name or card.name,
            fallback_reason=(first or card).fallback_reason,
        )
        self._stats = StatsView()

    async def _supervise(self) -> None:
        """Handles replies of the engine; when it dies, fails open requests and starts another."""
        while True:
            process = self._running
            while (reply := await process.receive()) is not None:
                self._handle(reply)
            self._health = Health.RESTARTING
            cause = process.cause_of_death
            _log.error("engine %d is gone: %s; starting another", process.pid, cause)
            self._fail_all(EngineStopped(f"The answer is not complete: {cause}."))
            await process.kill(cause)
            await self._restart()

    async def _restart(self) -> None:
        attempt = 0
        while True:
            await asyncio.sleep(_RESTART_PAUSES_S[min(attempt, len(_RESTART_PAUSES_S) - 1)])
            attempt += 1
            try:
                await self._open_process()
            except LoramuxError as error:
                _log.error("the engine did not start again: %s", error)
                continue
            # Registration needs the replies that _supervise reads from now on.
            self._registration = asyncio.create_task(self._register_again())
            return

    async def _register_again(self) -> None:
        for cid, card in list(self._adapters.items()):
            try:
                again = await self._register(card.path)
            except EngineStopped:
                return
            except LoramuxError as error:
                _log.error("adapter %s cannot be served any more: %s", cid, error)
                del self._adapters[cid]
                continue
            if again.cid != cid:
                _log.error("the files at %s have changed: %s is now %s", card.path, cid, again.cid)
                del self._adapters[cid]
            self._adapters[again.cid] = again
        self.num_restarts += 1
        self._health = Health.READY
        _log.warning("engine %s is ready again", self.engine_pid)

    def _handle(self, reply: Reply) -> None:
        match reply:
            case Events(events=events):
                self._stats.update(reply)
                for event in events:
                    stream = self._streams.get(event.request_id)
                    delta = stream.put(event) if stream is not None else None
                    if delta is not None and delta.stop_hit:
                        self._send(Finish(request_id=event.request_id, index=event.index))
            case Refused(request_id=request_id, error=error):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.fail(decode_error(error))
            case _:
                _log.warning("unexpected message from the engine: %s", type(reply).__name__)

    def _open_stream(self, request: Request) -> RequestStream:
        if self._health is not Health.READY:
            raise EngineStopped(f"The engine is {self._health.value}; try again in a few seconds.")
        self._check_limits(request)
        if request.request_id in self._streams:
            raise LoramuxError(f"Request id {request.request_id!r} is in use.")
        for cid, _ in request.selection:
            self._require_adapter(cid)
        request = request.for_engine(self.card.eos_token_ids)
        stream = RequestStream(OutputCollector(request, self.codec))
        self._streams[request.request_id] = stream
        self._send(Add(request=request))
        return stream

    def _check_limits(self, request: Request) -> None:
        if len(self._streams) >= self._options.max_queue + self.card.max_sequences:
            raise EngineBusy(
                f"{len(self._streams)} requests are open, and this server takes no more at once."
            )
        limit = self._options.max_tokens
        if limit is None or not self._streams:
            return
        num_open = sum(stream.request.num_tokens for stream in self._streams.values())
        if num_open + request.num_tokens > limit:
            raise EngineBusy(
                f"{num_open} tokens are open, and with this request they would be more than the "
                f"{limit} that this server takes at once."
            )

    def _require_adapter(self, cid: str) -> None:
        if cid not in self._adapters:
            raise AdapterNotFound(f"No adapter {cid} is registered.")

    async def _generate_one_token(self, selection: Selection) -> None:
        request = Request(
            request_id=f"probe-{secrets.token_hex(8)}",
            prompt_token_ids=(1,),
            params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            selection=selection,
        )
        async for _ in self.submit(request):
            pass

    async def _register(self, path: str) -> AdapterCard:
        answer = await self._running.call(lambda call_id: Register(call_id=call_id, path=path))
        assert answer.adapter is not None
        return answer.adapter

    @property
    def _running(self) -> EngineProcess:
        assert self._process is not None, "start() first"
        return self._process

    def _send(self, command: Command) -> None:
        self._running.send(command)

    def _fail_all(self, error: EngineStopped) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        if self._process is not None:
            self._process.fail_calls(error)
