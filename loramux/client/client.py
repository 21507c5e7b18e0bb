"""The synchronous Python client, which scripts/write_sync_client.py writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

import httpx2

from loramux.client import wire
from loramux.client.errors import Retryable
from loramux.client.push import (
    PushedAdapter,
    VersionInfo,
    of_peft,
    push_call,
    version_call,
)
from loramux.client.replies import (
    AdapterInfo,
    AdapterList,
    ChatChunk,
    ChatReply,
    CompletionChunk,
    CompletionReply,
    Detokenized,
    EngineInfo,
    HealthReply,
    ModelCard,
    ModelList,
    ReplicaInfo,
    ReplicaList,
    Tokens,
)
from loramux.client.retry import RetryPolicy
from loramux.client.stream import ChunkT, StreamReader
from loramux.client.wire import Call, Messages, Prompt, Target


class Client:
    """Client of one server. `**sampling` takes the fields of the HTTP API: temperature, seed, …

    A refused request (429, 503, connection refused) is retried up to max_retries times. timeout_s
    limits the wait for the next bytes, not the whole reply.
    """

    def __init__(
        self,
        base_url: str = wire.DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = wire.DEFAULT_TIMEOUT_S,
        max_retries: int = 3,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.base_url = base_url
        self._http = httpx2.Client(**wire.client_options(base_url, api_key, timeout_s))
        self._retries = RetryPolicy(max_retries=max_retries)
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        adapters: Sequence[str] | None = None,
        adapter_weights: Sequence[float] | None = None,
        **sampling: Any,
    ) -> ChatReply:
        target = Target(model, adapters, adapter_weights)
        call = wire.chat_call(messages, target, sampling, stream=False)
        return wire.decode_answer(self._send(call), ChatReply)

    def complete(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        adapters: Sequence[str] | None = None,
        adapter_weights: Sequence[float] | None = None,
        **sampling: Any,
    ) -> CompletionReply:
        target = Target(model, adapters, adapter_weights)
        call = wire.completion_call(prompt, target, sampling, stream=False)
        return wire.decode_answer(self._send(call), CompletionReply)

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        adapters: Sequence[str] | None = None,
        adapter_weights: Sequence[float] | None = None,
        **sampling: Any,
    ) -> Generator[ChatChunk, None, None]:
        """Stream chunks; raises if the reply is incomplete. Closing it early aborts the request."""
        target = Target(model, adapters, adapter_weights)
        call = wire.chat_call(messages, target, sampling, stream=True)
        return self._stream(call, ChatChunk)

    def stream_complete(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        adapters: Sequence[str] | None = None,
        adapter_weights: Sequence[float] | None = None,
        **sampling: Any,
    ) -> Generator[CompletionChunk, None, None]:
        """Stream chunks; raises if the reply is incomplete. Closing it early aborts the request."""
        target = Target(model, adapters, adapter_weights)
        call = wire.completion_call(prompt, target, sampling, stream=True)
        return self._stream(call, CompletionChunk)

    def models(self) -> list[ModelCard]:
        """Return the models of the server: the base first, then its adapters."""
        return list(wire.decode(self._send(wire.get("/v1/models")), ModelList).data)

    def adapters(self, *, busiest: int | None = None) -> list[AdapterInfo]:
        """All adapters with tier and traffic; with `busiest`, only that many, busiest first."""
        call = wire.adapters_call(busiest=busiest)
        return list(wire.decode(self._send(call), AdapterList).data)

    def warm(self, name: str) -> AdapterInfo:
        """Load the adapter and use it once, so that later requests do not wait for it."""
        return wire.decode(self._send(wire.warm_call(name)), AdapterInfo)

    def push(
        self, tensors: Mapping[str, Any], config: Any, name: str, *, version: int | None = None
    ) -> PushedAdapter:
        """Serve these tensors under a name from the next request on; on errors the old ones stay.

        `config`: of PEFT, or the fields of adapter_config.json. `version`: the step of the trainer,
        which must rise; default: the next one.
        """
        call = push_call(name, tensors, config, version=version)
        return wire.decode(self._send(call), PushedAdapter)

    def push_peft(
        self, model: Any, name: str, *, adapter: str | None = None, version: int | None = None
    ) -> PushedAdapter:
        """Serve an adapter of a PEFT model, default the active one, under a name."""
        tensors, config = of_peft(model, adapter)
        return self.push(tensors, config, name, version=version)

    def version(
        self, name: str, *, min_version: int | None = None, timeout_s: float = 30
    ) -> VersionInfo:
        """Return content id and version of a name; waits for `min_version`."""
        call = version_call(name, min_version, timeout_s)
        return wire.decode(self._send(call), VersionInfo)

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Return the servers of a router; a server by itself has no such route."""
        return wire.decode(self._send(wire.get("/v1/replicas")), ReplicaList).data

    def stats(self) -> EngineInfo:
        return wire.decode(self._send(wire.get("/v1/stats")), EngineInfo)

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        **options: Any,
    ) -> Tokens:
        call = wire.tokenize_call(prompt, messages, model, options)
        return wire.decode(self._send(call), Tokens)

    def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        return wire.decode(self._send(wire.detokenize_call(tokens, model)), Detokenized).prompt

    def health(self, *, deep: bool = False) -> HealthReply:
        """Health of the server, without retries; `deep` generates a token and loads an adapter."""
        with wire.transport_errors(self.base_url):
            response = self._http.send(self._request(wire.health_call(deep=deep)))
        return wire.health_reply(response.status_code, response.content)

    def _send(self, call: Call) -> bytes:
        with closing(self._open(call)) as response:
            with wire.transport_errors(self.base_url):
                return response.read()

    def _stream(self, call: Call, chunk_type: type[ChunkT]) -> Generator[ChunkT, None, None]:
        reader = StreamReader(chunk_type, call.num_choices)
        with closing(self._open(call)) as response:
            with wire.transport_errors(self.base_url, streaming=True):
                for event in httpx2.EventSource(response):
                    chunk = reader.read(event)
                    if chunk is not None:
                        yield chunk
                    if reader.is_over:
                        break
        reader.check_complete()

    def _open(self, call: Call) -> httpx2.Response:
        """Send with retries until status 200; the body is not read yet and is never retried."""
        num_failures = 0
        while True:
            try:
                return self._attempt(call)
            except Retryable as error:
                num_failures += 1
                delay_s = self._retries.delay_s(num_failures, error)
                if delay_s is None:
                    raise
            self._sleep(delay_s)

    def _attempt(self, call: Call) -> httpx2.Response:
        with wire.transport_errors(self.base_url):
            response = self._http.send(self._request(call), stream=True)
            if response.status_code == 200:
                return response
            with closing(response):
                response.read()
        raise wire.error_of(response)

    def _request(self, call: Call) -> httpx2.Request:
        return self._http.build_request(
            call.method, call.path, content=call.body, headers=dict(call.headers)
        )
