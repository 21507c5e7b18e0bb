"""Runs the engine in a process of its own, and starts a new one whenever it dies."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from loramux.backend import (
    AdapterUse,
    Delta,
    EngineStats,
    Health,
    ModelCard,
    failure_of,
)
from loramux.config.engine import EngineConfig
from loramux.engine.adapter_table import AdapterTable
from loramux.engine.adapter_tokenizers import AdapterTokenizers
from loramux.engine.messages import (
    Abort,
    Add,
    Adopt,
    Command,
    Events,
    Examine,
    Finish,
    ListPages,
    ListUses,
    Pin,
    Prewarm,
    Refused,
    Register,
    RegisterMany,
    Registration,
    Remove,
    Reply,
    Shutdown,
    Start,
    Verify,
    decode_error,
)
from loramux.engine.outputs import OutputCollector, RequestStream
from loramux.engine.process import EngineProcess, OnProgress
from loramux.engine.spawn import SpawnedWorker
from loramux.engine.tokenizer import Tokenizer, import_library
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    EngineBusy,
    EngineStopped,
    LoramuxError,
)
from loramux.threads import FOLDER_READS
from loramux.types.adapter import AdapterCard, InspectedCard
from loramux.types.pooling import Pooling
from loramux.types.request import FinishReason, Request, Selection, pooled_request
from loramux.types.residency import ResidencyView
from loramux.types.sampling import SamplingParams

_log = logging.getLogger(__name__)
_RESTART_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)
# Adapters of one message to the engine: requests that arrive meanwhile are handled in between.
_BATCH = 64
_BATCH_PAUSE_S = 0.05
# Adapters that a deep health check tries until one serves.
_MAX_PROBED = 8

Item = TypeVar("Item")


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
    chat_template: str | None = None
    """The text of the base's chat template; None: that of the model."""


class StatsView:
    """The newest statistics of an engine process, put together from its updates."""

    def __init__(self) -> None:
        self._newest = EngineStats()
        self.residency = ResidencyView()
        # None: to be put together by the next reader, as an update must not list all adapters.
        self._current: EngineStats | None = self._newest

    @property
    def current(self) -> EngineStats:
        if self._current is None:
            resident = tuple(self.residency.resident)
            self._current = replace(self._newest, resident_adapters=resident)
        return self._current

    def update(self, reply: Events) -> None:
        if reply.residency is not None:
            self.residency.apply(reply.residency.tiers, is_full=reply.residency.is_full)
            self._current = None
        if reply.stats is not None:
            self._newest = reply.stats
            self._current = None


class AsyncEngine:
    """Implements loramux.backend.TextBackend over an engine in another process."""

    def __init__(
        self,
        options: AsyncEngineOptions,
        *,
        on_progress: OnProgress = lambda what, share: None,
        worker: SpawnedWorker | None = None,
    ) -> None:
        """`worker`: a process that was spawned before, for the first engine."""
        self._worker = worker
        self._options = options
        self._on_progress = on_progress
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._streams: dict[str, RequestStream] = {}
        self._card: ModelCard | None = None
        self._tokenizers: AdapterTokenizers | None = None
        self._codec: Tokenizer | None = None
        self._table = AdapterTable()
        self._state = Health.STARTING
        self._stats = StatsView()
        self.num_restarts = 0

    @property
    def health(self) -> Health:
        return self._state

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
    def residency(self) -> ResidencyView:
        return self._stats.residency

    @property
    def adapters(self) -> Mapping[str, AdapterCard]:
        return self._table.cards

    @property
    def pinned(self) -> Set[str]:
        return self._table.pinned

    @property
    def engine_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _become(self, state: Health) -> None:
        self._state = state
        # Readers of residency reports also follow the state.
        self.residency.wake()

    async def start(self) -> None:
        # The library takes seconds to import, and the engine process starts meanwhile.
        threading.Thread(target=import_library, daemon=True, name="tokenizers").start()
        await self._open_process()
        self._supervisor = asyncio.create_task(self._supervise())
        folder = Path(self.card.tokenizer_folder)
        template = self._options.chat_template
        self._codec = await asyncio.to_thread(Tokenizer, folder, chat_template=template)
        self._tokenizers = AdapterTokenizers(self._codec, folder, vocab_size=self.card.vocab_size)
        self._become(Health.READY)

    async def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Yields the deltas of all choices; closing the iterator early aborts the request."""
        # It is kept from the tokenization of the prompt, so that this rarely waits.
        codec = await self.codec_for(request.selection)
        async with aclosing(self._answer(request, codec)) as deltas:
            async for delta in deltas:
                yield delta

    async def _answer(self, request: Request, codec: Tokenizer) -> AsyncGenerator[Delta, None]:
        stream = self._open_stream(request, codec)
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

    async def codec_for(self, selection: Selection) -> Tokenizer:
        if self._tokenizers is None:
            raise EngineStopped("The engine has not started yet.")
        for cid, _ in selection:
            self._require_adapter(cid)
        cards = [self.adapters[cid] for cid, _ in selection]
        found = self._tokenizers.find(cards)
        if found is not None:
            return found
        return await FOLDER_READS.run(self._tokenizers.read, cards)

    async def add_adapter(self, path: str) -> AdapterCard:
        answer = await self._running.call(lambda call_id: Register(call_id=call_id, path=path))
        assert answer.adapter is not None
        self._table.add(answer.adapter)
        return answer.adapter

    async def inspect_adapters(
        self, paths: Sequence[str]
    ) -> list[AdapterCard | InspectedCard | LoramuxError]:
        answers = await asyncio.gather(*map(self._inspect, _batches(paths)))
        return [found for batch in answers for found in batch]

    async def remove_adapter(self, cid: str) -> None:
        self._require_adapter(cid)
        if self._table.remove(cid):
            self._send(Remove(cid=cid))

    async def prewarm(self, cids: Sequence[str], *, num_busiest: int = 0) -> None:
        known = tuple(cid for cid in cids if cid in self.adapters)
        self._adopt(known)
        self._send(Prewarm(cids=known, num_busiest=num_busiest))

    async def pin_adapter(self, cid: str, pinned: bool) -> None:
        self._require_adapter(cid)
        self._adopt([cid])
        await self._running.call(lambda call_id: Pin(call_id=call_id, cid=cid, is_pinned=pinned))
        if not pinned:
            self._table.pinned.discard(cid)
        elif cid in self._table.cards:
            self._table.pinned.add(cid)

    async def adapter_uses(self) -> Sequence[AdapterUse]:
        answer = await self._running.call(lambda call_id: ListUses(call_id=call_id))
        return answer.uses or []

    async def page_kinds(self) -> bytes:
        answer = await self._running.call(lambda call_id: ListPages(call_id=call_id))
        return answer.pages or b""

    async def examine_adapter(self, path: str) -> Mapping[str, Any]:
        answer = await self._running.call(lambda call_id: Examine(call_id=call_id, path=path))
        return answer.report or {}

    async def probe(self, timeout_s: float) -> dict[str, float]:
        """Generates a token on the base, and reads an adapter and generates a token with it.

        Returns the seconds of each check, or raises. Adapters that cannot be served, as their files
        changed or are gone, are counted; the check goes on with another one.
        """
        seconds = {}
        async with asyncio.timeout(timeout_s):
            began = time.monotonic()
            await self._generate_one_token(())
            seconds["generate_s"] = time.monotonic() - began
            hot = self._table.hottest(self.residency.resident)
            num_broken = 0
            for cid in islice(dict.fromkeys((*hot, *self.adapters)), _MAX_PROBED):
                began = time.monotonic()
                try:
                    await self._probe_adapter(cid)
                except (AdapterRefused, AdapterNotFound) as error:
                    # One that was removed meanwhile is not broken.
                    num_broken += cid in self.adapters
                    _log.warning("adapter %s cannot be served: %s", cid, error)
                else:
                    seconds["adapter_s"] = time.monotonic() - began
                    break
        return seconds | ({"broken_adapters": float(num_broken)} if num_broken else {})

    async def _probe_adapter(self, cid: str) -> None:
        self._adopt([cid])
        await self._running.call(lambda call_id: Verify(call_id=call_id, cid=cid))
        await self._generate_one_token(((cid, 1.0),))

    async def close(self, *, drain_s: float) -> None:
        if self._state is Health.STOPPED:
            return
        self._become(Health.DRAINING)
        deadline = time.monotonic() + drain_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._become(Health.STOPPED)
        for task in (self._supervisor, self._restoring):
            if task is not None:
                task.cancel()
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
        worker, self._worker = self._worker, None
        self._process = await EngineProcess.open(start, self._on_progress, worker)
        card = self._process.card
        self._card = replace(
            card,
            name=options.served_name or card.name,
            fallback_reason=(first or card).fallback_reason,
        )
        ended, self._stats = self._stats, StatsView()
        ended.residency.wake()
        self._table.begin_process()

    async def _supervise(self) -> None:
        """Handles replies of the engine; when it dies, fails open requests and starts another."""
        while True:
            process = self._running
            try:
                while (reply := await process.receive()) is not None:
                    self._handle(reply)
            except Exception as error:  # The engine must be replaced, whatever the error is.
                _log.exception("a reply of engine %d cannot be handled", process.pid)
                process.cause_of_death = f"a reply of the engine cannot be handled: {error!r}"
            self._become(Health.RESTARTING)
            if self._restoring is not None:
                self._restoring.cancel()
            cause = process.cause_of_death
            _log.error("engine %d is gone: %s; starting another", process.pid, cause)
            self._fail_all(EngineStopped(f"The answer is not complete: {cause}."))
            try:
                await process.kill(cause)
            except Exception:  # Without another engine, no request would ever be served again.
                _log.exception("engine %d cannot be ended", process.pid)
            await self._restart(self._table.hottest(self.residency.resident))

    async def _restart(self, hot: Sequence[str]) -> None:
        """Starts engines until one is ready; `hot` are the adapters to load first."""
        attempt = 0
        while True:
            await asyncio.sleep(_RESTART_PAUSES_S[min(attempt, len(_RESTART_PAUSES_S) - 1)])
            attempt += 1
            try:
                await self._open_process()
            except Exception as error:  # Memory, processes or files may be available again later.
                is_expected = isinstance(error, LoramuxError | OSError)
                # One that was spawned and died is a restart, too.
                self.num_restarts += isinstance(error, EngineStopped)
                _log.error("the engine did not start again: %s", error, exc_info=not is_expected)
                continue
            self.num_restarts += 1
            self._become(Health.READY)
            _log.warning("engine %s is ready again", self.engine_pid)
            # It needs the replies that _supervise reads from now on.
            self._restoring = asyncio.create_task(self._restore(hot))
            return

    async def _restore(self, hot: Sequence[str]) -> None:
        """Pins adapters again, loads those that were in use, then adopts all others.

        Requests do not wait for it. An adapter that is removed meanwhile is left out.
        """
        for cid in list(self._table.pinned):
            try:
                await self.pin_adapter(cid, True)
            except EngineStopped:
                return
            except LoramuxError as error:
                # It may have been removed meanwhile.
                if cid in self.adapters:
                    _log.error("adapter %s cannot be pinned again: %s", cid, error)
        for cids in _batches(hot):
            await self.prewarm(cids)
            await asyncio.sleep(_BATCH_PAUSE_S)
        for cids in _batches(list(self.adapters)):
            self._adopt(cids)
            await asyncio.sleep(_BATCH_PAUSE_S)

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

    def _open_stream(self, request: Request, codec: Tokenizer) -> RequestStream:
        if self._state is not Health.READY:
            raise EngineStopped(f"The engine is {self._state.value}; try again in a few seconds.")
        self._check_limits(request)
        if request.request_id in self._streams:
            raise LoramuxError(f"Request id {request.request_id!r} is in use.")
        cids = [cid for cid, _ in request.selection]
        for cid in cids:
            self._require_adapter(cid)
            self._table.mark_used(cid)
        self._adopt(cids)
        request = request.for_engine(codec.eos_ids_with(self.card.eos_token_ids))
        stream = RequestStream(OutputCollector(request, codec))
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
        if cid not in self.adapters:
            raise AdapterNotFound(f"No adapter {cid} is registered.")

    async def _generate_one_token(self, selection: Selection) -> None:
        request_id, pooling = f"probe-{secrets.token_hex(8)}", self.card.pooling
        request = Request(
            request_id=request_id,
            prompt_token_ids=(1,),
            params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            selection=selection,
        )
        if not pooling.generates:
            kind = pooling.pooling or Pooling.LAST
            request = pooled_request(request_id, (1,), kind, selection=selection)
        # The text is not read, and the check must not depend on the tokenizer of an adapter.
        async for _ in self._answer(request, self.codec):
            pass

    async def _inspect(
        self, paths: Sequence[str]
    ) -> list[AdapterCard | InspectedCard | LoramuxError]:
        answer = await self._running.call(
            lambda call_id: RegisterMany(call_id=call_id, paths=tuple(paths), check="header")
        )
        found = [_result_of(registration) for registration in answer.registrations or ()]
        for card in found:
            if isinstance(card, AdapterCard):
                self._table.add(card)
        return found

    def _adopt(self, cids: Iterable[str]) -> None:
        """Lets the engine learn those of the adapters that it does not know yet."""
        for card in self._table.take_unknown(cids):
            self._send(Adopt(card=card))

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


def _result_of(registration: Registration) -> AdapterCard | InspectedCard | LoramuxError:
    if registration.error is not None:
        return decode_error(registration.error)
    card = registration.adapter or registration.inspected
    assert card is not None
    return card


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        yield batch
