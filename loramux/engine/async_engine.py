"""The engine of a language model in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sized
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from loramux.backend.host import EngineStats
from loramux.backend.text import Delta, ModelCard, failure_of
from loramux.base.threads import TOKENIZER_READS
from loramux.config.engine import EngineConfig
from loramux.engine.adapter_tokenizers import AdapterTokenizers
from loramux.engine.codec import EngineCodec
from loramux.engine.messages import Add, Events, Finish, ListPages, Reply, Start
from loramux.engine.outputs import OutputCollector, RequestStream
from loramux.engine.tokenizer import Tokenizer, import_library
from loramux.errors import EngineBusy, EngineStopped, LoramuxError
from loramux.types.adapter import AdapterCard
from loramux.types.pooling import Pooling
from loramux.types.request import FinishReason, Request, Selection, pooled_request
from loramux.types.sampling import SamplingParams
from loramux.worker.hosted import HostedEngine
from loramux.worker.messages import Abort, Message, Refused, decode_error
from loramux.worker.process import EngineKind, OnProgress
from loramux.worker.spawn import TEXT_ENGINE, SpawnedWorker

_log = logging.getLogger(__name__)
TEXT = EngineKind(TEXT_ENGINE, Reply, step_limit_s=120.0)


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


class AsyncEngine(HostedEngine[ModelCard, AdapterCard, EngineStats]):
    """Implements loramux.backend.text.TextBackend over an engine in another process."""

    kind = TEXT
    no_stats = EngineStats()

    def __init__(
        self,
        options: AsyncEngineOptions,
        *,
        on_progress: OnProgress = lambda what, share: None,
        worker: SpawnedWorker | None = None,
    ) -> None:
        """`worker`: a process that was spawned before, for the first engine."""
        super().__init__(on_progress=on_progress, worker=worker)
        self._options = options
        self._streams: dict[str, RequestStream] = {}
        self._tokenizers: AdapterTokenizers | None = None
        self._codec: Tokenizer | None = None

    @property
    def codec(self) -> Tokenizer:
        assert self._codec is not None, "start() first"
        return self._codec

    async def start(self) -> None:
        # The library takes seconds to import, and the engine process starts meanwhile.
        threading.Thread(target=import_library, daemon=True, name="tokenizers").start()
        await super().start()

    async def _prepare(self) -> None:
        folder = Path(self.card.tokenizer_folder)
        template = self._options.chat_template
        self._codec = await asyncio.to_thread(Tokenizer, folder, chat_template=template)
        self._tokenizers = AdapterTokenizers(
            self._codec, folder, vocab_size=self.card.vocab_size, chat_template=template
        )

    async def add_adapter(self, path: str) -> AdapterCard:
        """Register an adapter whose tokenizer files fit the base, too; raise AdapterRefused."""
        was_known = set(self.adapters)
        card = await super().add_adapter(path)
        if self._tokenizers is None:
            return card
        try:
            if self._tokenizers.find([card]) is None:
                await TOKENIZER_READS.run(self._tokenizers.read, [card])
        except BaseException:
            if card.cid not in was_known and card.cid in self.adapters:
                await self.remove_adapter(card.cid)
            raise
        return card

    async def close(self, *, drain_s: float) -> None:
        await super().close(drain_s=drain_s)
        if self._tokenizers is not None:
            await asyncio.to_thread(self._tokenizers.close)

    async def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Yield the deltas of all choices; closing the iterator early aborts the request."""
        # It is kept from the tokenization of the prompt, so that this rarely waits.
        codec = await self.codec_for(request.selection)
        async with aclosing(self._answer(request, codec)) as deltas:
            async for delta in deltas:
                yield delta

    async def _answer(self, request: Request, codec: EngineCodec) -> AsyncGenerator[Delta, None]:
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

    async def codec_for(self, selection: Selection) -> EngineCodec:
        if self._tokenizers is None:
            raise EngineStopped("The engine has not started yet.")
        for cid, _ in selection:
            self._require_adapter(cid)
        cards = [self.adapters[cid] for cid, _ in selection]
        found = self._tokenizers.find(cards)
        if found is not None:
            return found
        return await TOKENIZER_READS.run(self._tokenizers.read, cards)

    async def page_kinds(self) -> bytes:
        answer = await self._running.call(lambda call_id: ListPages(call_id=call_id))
        return answer.pages or b""

    def _start_message(self, first: ModelCard | None) -> Start:
        settings = asdict(self._options.config)
        if first is not None:
            # A restarted engine must not fall back to another device.
            settings["device"] = first.device
        return Start(model=str(self._options.model), settings=settings)

    def _described(self, card: ModelCard, first: ModelCard | None) -> ModelCard:
        return replace(
            card,
            name=self._options.served_name or card.name,
            fallback_reason=(first or card).fallback_reason,
        )

    @property
    def _open_requests(self) -> Sized:
        return self._streams

    def _fail_streams(self, error: EngineStopped) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()

    def _handle(self, reply: Message) -> None:
        match reply:
            case Events(events=events):
                self._stats.update(reply.stats, reply.residency)
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

    def _open_stream(self, request: Request, codec: EngineCodec) -> RequestStream:
        self._require_ready()
        self._check_limits(request)
        if request.request_id in self._streams:
            raise LoramuxError(f"Request id {request.request_id!r} is in use.")
        self._use_adapters(request.cids)
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

    async def _probe_selection(self, cid: str | None) -> None:
        selection: Selection = () if cid is None else ((cid, 1.0),)
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
