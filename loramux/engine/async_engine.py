"""The engine as a server sees it: jobs in, deltas out, and a new engine whenever one dies."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from loramux.backend import (
    AdapterCard,
    AdapterUse,
    Delta,
    EngineStats,
    Health,
    Job,
    ModelCard,
    failure_of,
)
from loramux.config.engine import EngineConfig
from loramux.engine.calls import PendingCalls
from loramux.engine.messages import (
    Abort,
    AdapterFacts,
    Add,
    Answer,
    Command,
    Events,
    Finish,
    Forget,
    ListUses,
    Pin,
    Prewarm,
    Ready,
    Refused,
    Register,
    Reply,
    Shutdown,
    Snapshot,
    Start,
    Verify,
    make_error,
)
from loramux.engine.outputs import OutputCollector
from loramux.engine.process import EngineProcess, OnProgress
from loramux.engine.streams import JobStream
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import AdapterNotFound, EngineBusy, EngineStopped, LoramuxError
from loramux.types.request import FinishReason, Request
from loramux.types.sampling import SamplingParams

_log = logging.getLogger(__name__)
_RESTART_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncEngineOptions:
    model: Path
    config: EngineConfig
    served_name: str | None = None
    """What requests call the base; None: the model's own name."""
    max_jobs: int = 4096
    """Jobs that are open at once, running or waiting; more are refused with EngineBusy."""
    max_job_tokens: int | None = None
    """The same in tokens: prompts and the longest answers that were asked for."""
    tenant_shares: Mapping[str, float] = field(default_factory=dict)
    adapter_shares: Mapping[str, float] = field(default_factory=dict)
    """Shares under fair scheduling, by name; a name that is not listed has a share of 1."""


class AsyncEngine:
    """Implements loramux.backend.Backend over an engine in another process."""

    def __init__(
        self, options: AsyncEngineOptions, *, on_progress: OnProgress = lambda what, share: None
    ) -> None:
        self._options = options
        self._on_progress = on_progress
        self._process: EngineProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._restorer: asyncio.Task[None] | None = None
        self._streams: dict[str, JobStream] = {}
        self._calls = PendingCalls()
        self._ready: Ready | None = None
        self._codec: Tokenizer | None = None
        self._adapters: dict[str, AdapterCard] = {}
        self._health = Health.STARTING
        self.stats = EngineStats()
        self.num_restarts = 0

    @property
    def health(self) -> Health:
        return self._health

    @property
    def card(self) -> ModelCard:
        ready, config = self._require_ready(), self._options.config
        return ModelCard(
            name=self._options.served_name or ready.name,
            path=ready.path,
            digest=ready.digest,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            dtype=ready.dtype,
            pool_bytes=ready.pool_bytes,
            block_tokens=ready.block_tokens,
            shapes=ready.shapes,
            max_loras=ready.max_loras,
            host_memory_bytes=config.host_memory_bytes,
            disk_space_bytes=0 if config.disk_folder is None else config.disk_space_bytes,
            adapter_memory_fraction=config.adapter_memory_fraction,
        )

    @property
    def codec(self) -> Tokenizer:
        assert self._codec is not None, "start() first"
        return self._codec

    @property
    def adapters(self) -> Mapping[str, AdapterCard]:
        return self._adapters

    @property
    def engine_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        await self._open_process()
        self._keeper = asyncio.create_task(self._keep_alive())
        self._codec = await asyncio.to_thread(Tokenizer, self._require_ready().folder)
        self._health = Health.READY

    async def submit(self, job: Job) -> AsyncIterator[Delta]:
        """Deltas of all choices until each has its finish_reason; closing it aborts the job."""
        stream = self._open_stream(job)
        try:
            while True:
                for delta in await stream.take():
                    if delta.finish_reason is FinishReason.ERROR:
                        raise failure_of(delta)
                    yield delta
                if stream.is_finished:
                    return
        finally:
            if self._streams.pop(job.request_id, None) is not None and not stream.is_finished:
                self._send(Abort(request_id=job.request_id))

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        facts = await self._register(path)
        old = self._adapters.get(name)
        card = self._adapters[name] = _card(name, facts)
        if old is not None:
            self._forget_unnamed(old.cid)
        return card

    async def remove_adapter(self, name: str) -> None:
        card = self._adapters.pop(name, None)
        if card is None:
            raise AdapterNotFound(f"The lora adapter '{name}' cannot be found.")
        self._forget_unnamed(card.cid)

    async def prewarm(self, names: Sequence[str], *, num_busiest: int = 0) -> None:
        cids = tuple(self._cid(name) for name in names)
        self._send(Prewarm(cids=cids, num_busiest=num_busiest))

    async def pin_adapter(self, name: str, pinned: bool) -> None:
        cid = self._cid(name)
        await self._call(lambda call_id: Pin(call_id=call_id, cid=cid, is_pinned=pinned))

    async def adapter_uses(self) -> Sequence[AdapterUse]:
        answer = await self._call(lambda call_id: ListUses(call_id=call_id))
        return answer.uses or []

    async def probe(self, timeout_s: float) -> dict[str, float]:
        """Really generates a token on the base and loads an adapter; seconds of each, or raises."""
        seconds = {}
        async with asyncio.timeout(timeout_s):
            began = time.monotonic()
            await self._probe_job(None)
            seconds["generate_s"] = time.monotonic() - began
            if self._adapters:
                name, card = next(iter(self._adapters.items()))
                began = time.monotonic()
                await self._call(lambda call_id: Verify(call_id=call_id, cid=card.cid))
                await self._probe_job(name)
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
        if self._keeper is not None:
            self._keeper.cancel()
        self._fail_all(EngineStopped("The server is shutting down."))
        if self._process is not None:
            self._process.send(Shutdown())
            await self._process.wait(timeout_s=3.0)

    async def _open_process(self) -> None:
        settings = asdict(self._options.config)
        start = Start(model=str(self._options.model), settings=settings)
        self._process = await EngineProcess.open(start, self._on_progress)
        self._ready = self._process.ready

    async def _keep_alive(self) -> None:
        """Passes on what the engine says; when it dies, fails what was open and starts another."""
        while True:
            process = self._process
            assert process is not None
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
            # Registration needs the replies that _keep_alive will read from now on.
            self._restorer = asyncio.create_task(self._restore_adapters())
            return

    async def _restore_adapters(self) -> None:
        for name, card in list(self._adapters.items()):
            try:
                self._adapters[name] = replace(
                    _card(name, await self._register(card.path)), created_s=card.created_s
                )
            except EngineStopped:
                return
            except LoramuxError as error:
                _log.error("adapter %s cannot be served any more: %s", name, error)
                del self._adapters[name]
        self.num_restarts += 1
        self._health = Health.READY
        _log.warning("engine %s is ready again", self.engine_pid)

    def _handle(self, reply: Reply) -> None:
        match reply:
            case Events(events=events, snapshot=snapshot):
                self.stats = _stats(snapshot)
                for event in events:
                    stream = self._streams.get(event.request_id)
                    delta = stream.put(event) if stream is not None else None
                    if delta is not None and delta.stop_hit:
                        self._send(Finish(request_id=event.request_id, index=event.index))
            case Refused(request_id=request_id, error=error):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.fail(make_error(error))
            case Answer():
                self._calls.answer(reply)
            case _:
                _log.warning("unexpected message from the engine: %s", type(reply).__name__)

    def _open_stream(self, job: Job) -> JobStream:
        if self._health is not Health.READY:
            raise EngineStopped(f"The engine is {self._health.value}; try again in a few seconds.")
        if len(self._streams) >= self._options.max_jobs:
            raise EngineBusy(
                f"{len(self._streams)} requests are open, and this server takes no more at once."
            )
        self._check_tokens(job)
        if job.request_id in self._streams:
            raise LoramuxError(f"Request id {job.request_id!r} is in use.")
        request = self._request(job)
        stream = JobStream(OutputCollector(request, self.codec), num_tokens=_num_tokens(job))
        self._streams[job.request_id] = stream
        self._send(Add(request=request))
        return stream

    def _check_tokens(self, job: Job) -> None:
        limit = self._options.max_job_tokens
        if limit is None or not self._streams:
            return
        num_open = sum(stream.num_tokens for stream in self._streams.values())
        if num_open + _num_tokens(job) > limit:
            raise EngineBusy(
                f"{num_open} tokens are open, and with this request they would be more than the "
                f"{limit} that this server takes at once."
            )

    def _forget_unnamed(self, cid: str) -> None:
        """Frees an adapter that no name stands for any more; requests that run on it finish."""
        if all(card.cid != cid for card in self._adapters.values()):
            self._send(Forget(cid=cid))

    def _cid(self, name: str) -> str:
        card = self._adapters.get(name)
        if card is None:
            raise AdapterNotFound(f"No adapter is called {name!r}.")
        return card.cid

    def _request(self, job: Job) -> Request:
        selection: tuple[tuple[str, float], ...] = ()
        if job.adapter is not None:
            selection = ((self._cid(job.adapter), job.adapter_weight),)
        options = self._options
        seed = job.params.seed
        return Request(
            request_id=job.request_id,
            prompt_token_ids=job.prompt_token_ids,
            params=job.params,
            selection=selection,
            eos_token_ids=self._require_ready().eos_token_ids,
            seed=secrets.randbits(63) if seed is None else seed & (2**63 - 1),
            tenant=job.tenant,
            tenant_share=options.tenant_shares.get(job.tenant, 1.0),
            adapter_share=options.adapter_shares.get(job.label or job.adapter or "", 1.0),
            cache_salt=job.cache_salt,
            timeout_s=job.timeout_s,
        )

    async def _probe_job(self, adapter: str | None) -> None:
        job = Job(
            request_id=f"probe-{secrets.token_hex(8)}",
            prompt_token_ids=(1,),
            params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            adapter=adapter,
        )
        async for _ in self.submit(job):
            pass

    async def _register(self, path: str) -> AdapterFacts:
        answer = await self._call(lambda call_id: Register(call_id=call_id, path=path))
        assert answer.adapter is not None
        return answer.adapter

    async def _call(self, make: Callable[[int], Command]) -> Answer:
        call_id, future = self._calls.open()
        self._send(make(call_id))
        return await future

    def _send(self, command: Command) -> None:
        assert self._process is not None
        self._process.send(command)

    def _fail_all(self, error: EngineStopped) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._calls.fail(error)

    def _require_ready(self) -> Ready:
        if self._ready is None:
            raise EngineStopped("The engine has not started yet.")
        return self._ready


def _card(name: str, facts: AdapterFacts) -> AdapterCard:
    return AdapterCard(
        name=name,
        path=facts.path,
        cid=facts.cid,
        rank=facts.rank,
        num_bytes=facts.num_bytes,
        warnings=facts.warnings,
        created_s=int(time.time()),
    )


def _num_tokens(job: Job) -> int:
    return job.params.n * (len(job.prompt_token_ids) + job.params.max_tokens)


def _stats(snapshot: Snapshot) -> EngineStats:
    return EngineStats(**{name: getattr(snapshot, name) for name in Snapshot.__struct_fields__})
