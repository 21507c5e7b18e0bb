"""The web page under /ui: its built files, in memory, with the headers that confine it."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

FOLDER = Path(__file__).parents[1] / "ui"
INDEX = "index.html"
ASSETS = "assets/"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_REVALIDATED, _KEPT = "no-cache", "public, max-age=31536000, immutable"
# No inline script or style, no other host, no frame around the page, and no text that becomes HTML.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        # Images that a model drew are blobs of the page's own memory.
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
# Beside those that all answers have.
CONFINEMENT: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": _POLICY,
        "cross-origin-opener-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
    }
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One built file, as it is and compressed."""

    media_type: str
    cache_control: str
    etag: str
    plain: bytes
    compressed: bytes


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the built files by their path below /ui/."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in MEDIA_TYPES)
    return {path.relative_to(FOLDER).as_posix(): _read(path) for path in paths}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    is_asset = path.parent != FOLDER
    return PageFile(
        media_type=MEDIA_TYPES[path.suffix],
        # Names of assets have a hash of their content.
        cache_control=_KEPT if is_asset else _REVALIDATED,
        etag=f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        plain=content,
        compressed=gzip.compress(content, 9, mtime=0),
    )


def file_response(request: Request, file: PageFile) -> Response:
    headers = {
        **CONFINEMENT,
        "cache-control": file.cache_control,
        "etag": file.etag,
        "vary": "accept-encoding",
    }
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = file.plain
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"], content = "gzip", file.compressed
    return Response(content, headers=headers, media_type=file.media_type)


def is_browser(request: Request) -> bool:
    """Whether the request comes from the address bar of a browser: API clients ask for no HTML."""
    return "text/html" in request.headers.get("accept", "")


def to_page(request: Request) -> Response:
    """Send a browser to the page; relative, as a proxy may serve it below a path."""
    headers = {"vary": "accept", "cache-control": "no-store"}
    return RedirectResponse("ui/", 307, headers=headers)
