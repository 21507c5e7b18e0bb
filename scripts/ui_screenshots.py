"""Takes the screenshots of docs/ui.md: each view, light and dark, wide and narrow.

python -m scripts.ui_screenshots [--only VIEW ...] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image
from playwright.sync_api import Browser, Page

from tests.serve_factory import running_server
from tests.ui_factory import UiServer, chromium, ui_server, watched_page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "ui"
SIZES = {"wide": {"width": 1360, "height": 860}, "narrow": {"width": 400, "height": 860}}
SCHEMES = ("light", "dark")
MAX_HEIGHT = 1500
START_S = 600
WITH_TRAFFIC = ("live", "adapter")
NUM_CLIENTS = 6
QUESTIONS = ("Tell me a story.", "What is the capital of Italy?", "Name three colours.")


def send(server: UiServer, method: str, path: str, body: Any = None) -> Any:
    headers = {"authorization": f"Bearer {server.admin}"}
    return httpx2.request(method, server.url + path, json=body, headers=headers, timeout=120)


def fill(server: UiServer) -> None:
    """Pushes versions and moves an alias, so that the page has something to show."""
    for version, folder in (("1.0.0", "pirate"), ("1.1.0", "shout"), ("1.2.0", "json")):
        body = {"reference": f"acme/voice@{version}", "source": str(server.adapters / folder)}
        send(server, "POST", "/v1/adapters", body)
    send(server, "POST", "/v1/adapters/acme/voice/promote", {"version": "1.0.0"})
    weights = {"1.0.0": 90, "1.1.0": 10}
    send(server, "POST", "/v1/adapters/acme/voice/split", {"weights": weights, "alias": "canary"})
    recipe = {"adapters": ["acme/voice@1.0.0", "acme/voice@1.1.0"], "weights": [0.7, 0.5]}
    send(server, "POST", "/v1/adapters", {"reference": "acme/blend@1.0.0", "recipe": recipe})


def traffic(server: UiServer, ended: threading.Event, number: int) -> None:
    models = ("pirate", "json", "shout", "sentiment", "acme/voice", "acme/blend", "")
    while not ended.is_set():
        body = {
            "model": models[number % len(models)],
            "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            "max_tokens": 24 + 7 * number % 40,
        }
        send(server, "POST", "/v1/chat/completions", body)
        number += 1


def playground(page: Page) -> None:
    page.get_by_role("button", name="Run 3 columns").click()
    page.get_by_role("link", name="Receipt", exact=True).nth(2).wait_for()
    page.get_by_label("Differences to the base").check()


def receipt(page: Page) -> None:
    page.locator(".rows .row").nth(2).click()
    page.get_by_text("The signature is valid").wait_for()


def adapter(page: Page) -> None:
    page.get_by_role("heading", name="Versions of").wait_for()
    page.get_by_role("button", name="Examine the files").click()
    page.get_by_text("This adapter can be served.").wait_for()
    time.sleep(12)


def live(page: Page) -> None:
    page.locator("svg.map").wait_for()
    # A few values for the charts.
    time.sleep(20)


def listed(page: Page) -> None:
    page.locator(".rows .row").nth(4).wait_for()


def images(page: Page) -> None:
    page.get_by_label("Prompt", exact=True).fill("a fox on a yellow background")
    page.get_by_label("Steps").fill("12")
    page.get_by_role("button", name="Add a column").click()
    column = page.get_by_role("article").nth(3)
    column.get_by_role("button", name="Add another adapter").click()
    field = column.get_by_label("Column 4, adapter 2")
    field.fill("night")
    field.press("Tab")
    column.get_by_label("Column 4, weight of night").fill("0.5")
    page.get_by_role("button", name="Run 4 columns").click()
    page.get_by_text("Finished.").nth(3).wait_for()


VIEWS: dict[str, tuple[str, Callable[[Page], None]]] = {
    "live": ("live", live),
    "playground": ("playground", playground),
    "adapters": ("adapters", listed),
    "adapter": ("adapters/acme%2Fvoice%401.0.0", adapter),
    "receipts": ("receipts", listed),
    "receipt": ("receipts", receipt),
}


def shoot(page: Page, path: Path) -> None:
    time.sleep(0.7)
    image = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    image = image.crop((0, 0, image.width, min(image.height, MAX_HEIGHT)))
    image.convert("RGB").save(path, "WEBP", quality=70, method=6)


def shoot_schemes(page: Page, folder: Path, name: str) -> None:
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        shoot(page, folder / f"{name}-{scheme}.webp")


def shoot_images(browser: Browser, work: Path, folder: Path) -> None:
    """Take the playground of a server that draws, with the small image model."""
    with running_server(work / "log", "--images", timeout_s=START_S) as running:
        for size, viewport in SIZES.items():
            with watched_page(browser, running.url, viewport=viewport) as (page, _):
                page.goto(f"{running.url}/ui/")
                images(page)
                shoot_schemes(page, folder, f"images-{size}")


def shoot_all(browser: Browser, server: UiServer, folder: Path, only: list[str]) -> None:
    for name, (view, prepare) in VIEWS.items():
        if only and name not in only:
            continue
        ended = threading.Event()
        clients = range(NUM_CLIENTS if name in WITH_TRAFFIC else 0)
        load = [threading.Thread(target=traffic, args=(server, ended, one)) for one in clients]
        for one in load:
            one.start()
        for size, viewport in SIZES.items():
            options = {"viewport": viewport, "device_scale_factor": 1}
            with watched_page(browser, server.url, key=server.admin, **options) as (page, _):
                page.goto(f"{server.url}/ui/#/{view}")
                prepare(page)
                shoot_schemes(page, folder, f"{name}-{size}")
        ended.set()
        for one in load:
            one.join()
    if only and "key" not in only:
        return
    for scheme in SCHEMES:
        with watched_page(browser, server.url, viewport=SIZES["narrow"], color_scheme=scheme) as (
            page,
            _,
        ):
            page.goto(f"{server.url}/ui/")
            page.get_by_label("API key").wait_for()
            shoot(page, folder / f"key-narrow-{scheme}.webp")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], choices=[*VIEWS, "images", "key"])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    folder, only = args.folder, args.only
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="loramux-") as work, chromium() as browser:
        if only != ["images"]:
            # A small pool: its map shows single pages.
            flags = ("--pool-id", "demo", "--device-memory", "256MiB")
            with ui_server(Path(work) / "text", *flags, timeout_s=START_S) as server:
                fill(server)
                shoot_all(browser, server, folder, only)
        if not only or "images" in only:
            (Path(work) / "images").mkdir()
            shoot_images(browser, Path(work) / "images", folder)
    total = sum(path.stat().st_size for path in folder.glob("*.webp"))
    print(f"{len(list(folder.glob('*.webp')))} images, {total / 1000:.0f} kB in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
