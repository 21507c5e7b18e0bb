"""A client's request: what names its adapter, and what is passed on."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from loramux.router.named import names_in
from loramux.router.repeats import is_repeatable
from loramux.types.expected import EXPECT_HEADER

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection transfer-encoding te trailer upgrade".split()
)
# The client of the replica, or the router, sets these itself.
_DROPPED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", EXPECT_HEADER.encode()}
_BYTES_PER_TOKEN = 4
# The header that replaces the adapter of a body.
_SAGEMAKER = "x-amzn-sagemaker-adapter-identifier"


class BodyTooLarge(Exception): ...


class BodiesTooLarge(Exception):
    """The bodies of all open requests take too much memory."""


class BodyLimits:
    """What bodies may take of the router's memory: one, and all that are open."""

    def __init__(self, each: int, together: int) -> None:
        self.each = each
        self._left = together

    def take(self, size: int) -> None:
        if size > self._left:
            raise BodiesTooLarge
        self._left -= size

    def give_back(self, size: int) -> None:
        self._left += size


class ClientLeft(Exception): ...


class _Named(msgspec.Struct):
    """The fields of all APIs that name an adapter."""

    model: Any = None
    adapters: Any = None
    artifact: Any = None
    adapter_id: Any = None
    lora_path: Any = None
    parameters: Any = None


_NAMED = msgspec.json.Decoder(_Named)
_BOUNDARY = re.compile(r'boundary=(?:"([^"]+)"|([^;\s]+))', re.IGNORECASE)
_FIELD = re.compile(rb'content-disposition:[^\r\n]*;\s*name="([^"]*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    method: str
    path: str
    """Without the query."""
    target: str
    """Path and query as they came."""
    headers: list[tuple[str, str]]
    body: bytes
    name: str
    """What is hashed: the name of the adapter, and who asks where names may differ by that."""
    request_id: str
    names: frozenset[str] = frozenset()
    """All adapters that it may name, also as terms of sums."""

    @property
    def prompt_tokens(self) -> float:
        """A guess by the size of the body."""
        return len(self.body) / _BYTES_PER_TOKEN

    @property
    def is_repeatable(self) -> bool:
        """Whether a second try has no effect beside its answer."""
        return is_repeatable(self.method, self.path)

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")


async def read_body(receive: Receive, limits: BodyLimits) -> bytes:
    """Read a body; raise BodyTooLarge, BodiesTooLarge or ClientLeft.

    The caller gives its size back to the limits.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            piece = message.get("body", b"")
            if size + len(piece) > limits.each:
                raise BodyTooLarge
            limits.take(len(piece))
            size += len(piece)
            pieces.append(piece)
            if not message.get("more_body"):
                return b"".join(pieces)
    except BaseException:
        limits.give_back(size)
        raise


def make_asked(scope: Scope, body: bytes, *, tenant_header: str = "") -> Asked:
    """Return the request of a scope.

    `tenant_header`: in lower case, the header by which the servers tell tenants apart.
    """
    target = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = scope.get("query_string", b"").decode("latin-1")
    headers = _headers(scope)
    given = next((value for key, value in headers if key == "x-request-id"), "")
    request_id = given or uuid.uuid4().hex
    if not given:
        headers.append(("x-request-id", request_id))
    named = _named(body, headers)
    return Asked(
        method=scope["method"],
        path=scope["path"],
        target=f"{target}?{query}" if query else target,
        headers=headers,
        body=body,
        name=_adapter_name(named, headers, tenant_header),
        request_id=request_id,
        names=names_in(_texts(named, headers), body),
    )


def _headers(scope: Scope) -> list[tuple[str, str]]:
    headers, forwarded = [], ""
    for key, value in scope["headers"]:
        if key == b"x-forwarded-for":
            forwarded = value.decode("latin-1")
        elif key not in _DROPPED:
            headers.append((key.decode("latin-1"), value.decode("latin-1")))
    if scope.get("client"):
        address = scope["client"][0]
        headers.append(("x-forwarded-for", f"{forwarded}, {address}" if forwarded else address))
    return headers


def _named(body: bytes, headers: list[tuple[str, str]]) -> _Named:
    """Return empty fields where none can be read: the replica says what is wrong."""
    kind = next((value for key, value in headers if key == "content-type"), "")
    if kind.lower().startswith("multipart/form-data"):
        return _form_fields(body, kind)
    if body.lstrip()[:1] != b"{":
        return _Named()
    try:
        return _NAMED.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Named()


def _form_fields(body: bytes, kind: str) -> _Named:
    """Read `model` and `adapters` from the parts of a form, and no files."""
    found = _BOUNDARY.search(kind)
    if found is None:
        return _Named()
    model, adapters = None, []
    for part in body.split(b"--" + (found[1] or found[2]).encode())[1:]:
        head, gap, value = part.partition(b"\r\n\r\n")
        field = _FIELD.search(head)
        if not gap or field is None or b"filename" in head.lower():
            continue
        text = value.removesuffix(b"\r\n").decode("utf-8", "replace")
        if field[1] == b"model":
            model = text
        elif field[1] in (b"adapters", b"adapters[]"):
            adapters.append(text)
    return _Named(model=model, adapters=adapters)


def adapter_name(body: bytes, headers: list[tuple[str, str]], tenant_header: str = "") -> str:
    """Return what a request asks for; empty where nothing can be read."""
    return _adapter_name(_named(body, headers), headers, tenant_header)


def _texts(named: _Named, headers: list[tuple[str, str]]) -> Iterator[str]:
    """Yield every text that may name adapters: which of them counts is the server's matter."""
    parameters = named.parameters if isinstance(named.parameters, dict) else {}
    fields = (
        named.model, named.adapters, named.artifact, named.adapter_id, named.lora_path,
        parameters.get("adapter_id"), [value for key, value in headers if key == _SAGEMAKER],
    )  # fmt: skip
    for field in fields:
        for text in field if isinstance(field, list) else (field,):
            if isinstance(text, str):
                yield text


def _adapter_name(named: _Named, headers: list[tuple[str, str]], tenant_header: str) -> str:
    parameters = named.parameters if isinstance(named.parameters, dict) else {}
    of_header = next((value for key, value in headers if key == _SAGEMAKER), None)
    found = (
        of_header
        or _sum(named.adapters)
        or named.artifact
        or named.adapter_id
        or named.lora_path
        or parameters.get("adapter_id")
        or named.model
    )
    if not isinstance(found, str):
        return ""
    # A bare name may mean another adapter for another tenant.
    telling = ("authorization", "x-api-key", tenant_header)
    who = [value for key, value in headers if key in telling]
    return "\0".join((found, *who)) if "/" not in found and who else found


def model_names(body: bytes, headers: list[tuple[str, str]]) -> list[str]:
    """Return the names of models and adapters that a request has, its `model` first."""
    named = _named(body, headers)
    adapters = named.adapters if isinstance(named.adapters, list) else [named.adapters]
    found = (named.model, *adapters, named.artifact, named.adapter_id, named.lora_path)
    return [name for name in found if isinstance(name, str) and name]


def _sum(adapters: Any) -> str:
    if not isinstance(adapters, list):
        return ""
    return "+".join(one for one in adapters if isinstance(one, str))


def credentials(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Return the keys that a request names."""
    found = set()
    for name, value in headers:
        if name.lower() == "x-api-key":
            found.add(value.strip())
        elif name.lower() == "authorization":
            found.add(value.strip().partition(" ")[2].strip())
    return found


def passed_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that go to the client."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
