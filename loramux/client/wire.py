"""Request bodies, reply decoding and error mapping of both clients."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from loramux.client.errors import (
    BadReply,
    ClientError,
    ConnectFailed,
    ConnectionLost,
    IncompleteStream,
    Retryable,
    ServerError,
    TimedOut,
    error_for_status,
)
from loramux.client.replies import ChatReply, CompletionReply, HealthReply
from loramux.client.retry import parse_retry_after
from loramux.errors import InvalidRequest

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 600.0
MAX_CONNECT_S = 10.0
T = TypeVar("T")
ReplyT = TypeVar("ReplyT", ChatReply, CompletionReply)

Messages = Sequence[Mapping[str, Any]]
# One text, one list of token ids, or several of either.
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Target:
    """The model of a request.

    `model` may be an adapter's name, or a sum such as a+0.3*b; adapters=[] selects the base.
    """

    model: str | None = None
    adapters: Sequence[str] | None = None
    adapter_weights: Sequence[float] | None = None

    def fields(self) -> dict[str, Any]:
        given = {
            "model": self.model,
            "adapters": self.adapters,
            "adapter_weights": self.adapter_weights,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    body: bytes | None = None
    num_choices: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)


def get(path: str) -> Call:
    return Call(method="GET", path=path)


def post(path: str, fields: Mapping[str, Any], *, num_choices: int = 1) -> Call:
    body = msgspec.json.encode(fields)
    return Call(method="POST", path=path, body=body, num_choices=num_choices)


def multipart(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return the body of a form of files, and its content type."""
    boundary = uuid.uuid4().hex
    parts = [
        f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"; filename="{name}"'
        "\r\n\r\n".encode()
        + content
        + b"\r\n"
        for name, content in files.items()
    ]
    end = f"--{boundary}--\r\n".encode()
    return b"".join([*parts, end]), f"multipart/form-data; boundary={boundary}"


def chat_call(
    messages: Messages, target: Target, sampling: Mapping[str, Any], *, stream: bool
) -> Call:
    fields = {"messages": messages, **target.fields(), **_options(sampling, stream=stream)}
    return post("/v1/chat/completions", fields, num_choices=sampling.get("n") or 1)


def completion_call(
    prompt: Prompt, target: Target, sampling: Mapping[str, Any], *, stream: bool
) -> Call:
    fields = {"prompt": prompt, **target.fields(), **_options(sampling, stream=stream)}
    is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    num_prompts = 1 if is_one else len(prompt)
    return post("/v1/completions", fields, num_choices=num_prompts * (sampling.get("n") or 1))


def _options(sampling: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    if "stream" in sampling:
        raise InvalidRequest(
            "stream is not an option here: call stream_chat or stream_complete to stream.",
            param="stream",
        )
    if stream:
        return {"stream": True, "stream_options": {"include_usage": True}, **sampling}
    return dict(sampling)


def tokenize_call(
    prompt: str | None, messages: Messages | None, model: str | None, options: Mapping[str, Any]
) -> Call:
    if (prompt is None) == (messages is None):
        raise InvalidRequest("Give either a prompt or messages.", param="prompt")
    text = {"prompt": prompt} if messages is None else {"messages": messages}
    return post("/tokenize", {**text, **Target(model).fields(), **options})


def detokenize_call(tokens: Sequence[int], model: str | None) -> Call:
    return post("/detokenize", {"tokens": tokens, **Target(model).fields()})


def adapters_call(*, busiest: int | None) -> Call:
    return get("/v1/adapters" if busiest is None else f"/v1/adapters?order=busiest&limit={busiest}")


def warm_call(name: str) -> Call:
    return post(f"/v1/adapters/{quote(name, safe='/@:')}/warm", {})


def health_call(*, deep: bool) -> Call:
    return get("/health?deep=1" if deep else "/health")


def client_options(base_url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """Arguments of httpx2's clients. The URL may end with /v1, like that of OpenAI's client."""
    if not base_url.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"{base_url!r} is not a server's address. Write it like {DEFAULT_URL}.",
            param="base_url",
        )
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return {
        "base_url": base_url.rstrip("/").removesuffix("/v1"),
        "headers": headers,
        "timeout": httpx2.Timeout(timeout_s, connect=min(timeout_s, MAX_CONNECT_S), pool=None),
        # Thousands of streams may be open at once; the server limits them with 429.
        "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=100),
    }


@contextmanager
def transport_errors(base_url: str, *, streaming: bool = False) -> Iterator[None]:
    """Convert httpx2's exceptions into those of this package."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise ConnectFailed(f"No server answers at {base_url}: {error}") from error
    except httpx2.TimeoutException as error:
        raise TimedOut(f"The server at {base_url} sent nothing for too long.") from error
    except httpx2.SSEError as error:
        raise BadReply(f"The server did not stream: {error}") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        if streaming:
            raise IncompleteStream(
                f"The stream broke off: {reason}. The answer so far is not complete."
            ) from error
        raise ConnectionLost(f"The connection to {base_url} broke: {reason}.") from error


def error_of(response: httpx2.Response) -> ClientError:
    """Return the error of a response whose body has been read."""
    error = error_for_status(response.status_code, response.text)
    if isinstance(error, Retryable):
        error.retry_after_s = parse_retry_after(response.headers.get("retry-after"))
    return error


def decode(body: bytes, reply_type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=reply_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadReply(
            f"The reply is not what an OpenAI-style server sends: {error}",
            body=body.decode(errors="replace"),
        ) from error


def decode_answer(body: bytes, reply_type: type[ReplyT]) -> ReplyT:
    """Decode a reply; raise if a choice ended with an error or an abort."""
    reply = decode(body, reply_type)
    if not reply.choices:
        raise BadReply("The reply has no choices.", body=body.decode(errors="replace"))
    for choice in reply.choices:
        if choice.finish_reason in ("error", "abort"):
            raise ServerError(
                f"The answer ended with finish_reason {choice.finish_reason!r}: not complete.",
                body=body.decode(errors="replace"),
            )
    return reply


def health_reply(status: int, body: bytes) -> HealthReply:
    try:
        found = msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = {"text": body.decode(errors="replace")}
    detail = found if isinstance(found, dict) else {"text": str(found)}
    return HealthReply(is_healthy=status == 200, status=status, detail=detail)
