"""Reads the parts of a multipart/form-data body of bounded size."""

from __future__ import annotations

from dataclasses import dataclass, field
from email.message import Message

from loramux.errors import InvalidRequest
from loramux.server.errors import BodyTooLarge, NotJson

MULTIPART = "multipart/form-data"
MAX_PARTS = 64
MAX_HEADER_BYTES = 4096
MAX_TEXT_BYTES = 2**18
"""Limit of one field that is not a file."""
_LINE = b"\r\n"


@dataclass(slots=True)
class Form:
    """Fields in the order of the body; a name may come several times."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[bytes]] = field(default_factory=dict)


def media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def parse_form(body: bytes, content_type: str) -> Form:
    """Raises InvalidRequest, BodyTooLarge, or NotJson for another type."""
    if media_type(content_type) != MULTIPART:
        raise NotJson(
            f"Send the files as {MULTIPART}, or as base64 in JSON, not '{content_type[:200]}'."
        )
    form = Form()
    for part in _parts(body, boundary_of(content_type)):
        name, is_file, content = _content(part)
        if is_file:
            form.files.setdefault(name, []).append(content)
        else:
            form.texts.setdefault(name, []).append(_text(name, content))
    return form


def boundary_of(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not 0 < len(boundary) <= 200 or not boundary.isascii():
        raise InvalidRequest("The header Content-Type of the form has no valid boundary.")
    return b"--" + boundary.encode()


def _parts(body: bytes, boundary: bytes) -> list[bytes]:
    # The first boundary has no line before it.
    pieces = (_LINE + body).split(_LINE + boundary, MAX_PARTS + 2)
    if len(pieces) > MAX_PARTS + 2:
        raise BodyTooLarge(f"The form has more than {MAX_PARTS} parts.")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):  # noqa: PLR2004  (preamble and end)
        raise InvalidRequest("The form is incomplete: its last boundary is missing.")
    return pieces[1:-1]


def _content(part: bytes) -> tuple[str, bool, bytes]:
    """Returns the name of a part, whether it is a file, and its content."""
    head, end, content = part.removeprefix(_LINE).partition(_LINE + _LINE)
    if not end or len(head) > MAX_HEADER_BYTES:
        raise InvalidRequest("A part of the form has no headers, or too long ones.")
    header = Message()
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            header["content-disposition"] = value.strip()
    name = header.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise InvalidRequest("A part of the form has no name.")
    is_file = header.get_param("filename", header="content-disposition") is not None
    return name, is_file, content


def _text(name: str, content: bytes) -> str:
    if len(content) > MAX_TEXT_BYTES:
        raise BodyTooLarge(f"The field {name[:100]!r} has more than {MAX_TEXT_BYTES} bytes.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The field {name[:100]!r} is not valid UTF-8.") from error
