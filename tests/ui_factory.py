"""A server with the web page, thousands of stored adapters, and a browser that watches the page."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import axe_playwright_python
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    Response,
    expect,
    sync_playwright,
)
from sqlalchemy import insert

from loramux.base.signing import make_key_files
from loramux.registry import schema as tables
from loramux.registry.keys import KeyRights
from loramux.registry.registry import Registry
from loramux.types.access import ALL_SCOPES, KeyScope
from tests.registry_factory import make_cid
from tests.serve_factory import RunningServer, running_server

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "adapters"
DEMO = ("json", "pirate", "sentiment", "shout")
NUM_STORED = 3000
SOON_MS = 60_000
CHROMIUM = shutil.which("chromium")
NO_CHROMIUM = "no chromium: apt-get install chromium (make setup does it where it may)"
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")


def store_names(url: str, count: int) -> None:
    """Write versions without files: enough for a list."""
    with Registry(url) as registry, registry._database.writing() as connection:
        tenant = connection.execute(
            insert(tables.tenants).values(name="bulk", created_at=1.0)
        ).inserted_primary_key
        assert tenant is not None
        cids = [make_cid(number) for number in range(count)]
        manifest = {"format": "loramux-adapter/1"}
        rows = [
            {"cid": cid, "manifest": manifest, "size_bytes": 1000 + number, "created_at": 1.0}
            for number, cid in enumerate(cids)
        ]
        connection.execute(insert(tables.contents), rows)
        adapters = [
            {
                "id": 10_000 + number,
                "tenant_id": tenant[0],
                "name": f"adapter-{number:04d}",
                "latest": "1.0.0",
                "revision": 0,
                "created_at": 1.0,
            }
            for number in range(count)
        ]
        connection.execute(insert(tables.adapters), adapters)
        versions = [
            {"adapter_id": 10_000 + number, "version": "1.0.0", "cid": cid, "created_at": 1.0}
            for number, cid in enumerate(cids)
        ]
        connection.execute(insert(tables.versions), versions)


@dataclass(frozen=True)
class UiServer:
    running: RunningServer
    adapters: Path
    """The demo adapters, from which the server lets them be pushed."""
    admin: str
    """A key for everything."""
    infer: str
    """A key of the tenant acme that may only generate."""

    @property
    def url(self) -> str:
        return self.running.url


@contextmanager
def ui_server(
    folder: Path, *flags: str, num_stored: int = NUM_STORED, timeout_s: float = 240
) -> Iterator[UiServer]:
    """Yield the default model with the demo adapters, keys, signed receipts and a push root."""
    registry = folder / "data" / "registry.db"
    registry.parent.mkdir(parents=True)
    store_names(str(registry), num_stored)
    with Registry(registry) as opened:
        admin = opened.access.create_key(KeyRights(tenant=None, scopes=ALL_SCOPES)).text
        rights = KeyRights(tenant="acme", scopes=frozenset({KeyScope.INFER}))
        infer = opened.access.create_key(rights).text
    make_key_files(folder / "receipts.pem")
    adapters = folder / "adapters"
    shutil.copytree(EXAMPLES, adapters)
    given = [
        *("--device-memory", "768MiB"),
        *("--lora-modules", *(f"{name}={adapters / name}" for name in DEMO)),
        *("--registry", str(registry), "--data", str(folder / "data")),
        *("--receipt-key", str(folder / "receipts.pem")),
        *("--allowed-roots", str(adapters)),
    ]
    with running_server(folder / "log", *given, *flags, timeout_s=timeout_s) as server:
        yield UiServer(server, adapters, admin, infer)


@dataclass
class Watch:
    """What the page did that it must not do."""

    host: str
    faults: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    """Patterns of console messages that a test brings about."""

    def follow(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("request", self._request)
        page.on("response", self._response)

    def check(self) -> None:
        unexpected = [
            fault
            for fault in self.faults
            if not any(re.search(pattern, fault) for pattern in self.expected)
        ]
        assert unexpected == [], unexpected

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text} {message.location.get('url', '')}")

    def _request(self, request: Request) -> None:
        # A blob is in the page's own memory; its address names the page's origin.
        if urlsplit(request.url.removeprefix("blob:")).netloc != self.host:
            self.faults.append(f"other host: {request.url}")

    def _response(self, response: Response) -> None:
        if "set-cookie" in response.headers:
            self.faults.append(f"cookie: {response.url}")


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched_page(
    browser: Browser, url: str, *, key: str | None = None, **options: object
) -> Iterator[tuple[Page, Watch]]:
    """Yield a page in a context of its own, with nothing stored but the key."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(SOON_MS)
    expect.set_options(timeout=SOON_MS)
    if key is not None:
        # What the page does with a key that is typed into it.
        page.add_init_script(f"sessionStorage.setItem('loramux.key', '{key}')")
    watch = Watch(urlsplit(url).netloc)
    watch.follow(page)
    try:
        yield page, watch
    finally:
        context.close()


def serious(page: Page) -> list[str]:
    """Return what axe-core finds of WCAG 2.1 A and AA that is serious or critical."""
    page.evaluate(AXE.read_text())
    found = page.evaluate(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})"
    )
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:150] for node in one['nodes'][:3]]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
