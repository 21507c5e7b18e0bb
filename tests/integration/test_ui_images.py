"""The web page of a server that draws: images side by side, partial images, receipts, its views."""

from __future__ import annotations

import base64
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

pytest.importorskip("playwright", reason="the extra dev has playwright")

import uvicorn  # noqa: E402
from PIL import Image  # noqa: E402
from playwright.sync_api import Browser, Locator, Page, expect  # noqa: E402

from loramux.config.images import DEMO  # noqa: E402
from loramux.http_server.serving import listen  # noqa: E402
from tests.image_factory import ATTENTION, make_adapter, make_pipeline  # noqa: E402
from tests.image_server import ImageClient, image_client, save_adapters  # noqa: E402
from tests.serve_factory import running_server  # noqa: E402
from tests.ui_factory import (  # noqa: E402
    CHROMIUM,
    EXAMPLES,
    NO_CHROMIUM,
    ROOT,
    chromium,
    serious,
    watched_page,
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
WIDE = {"width": 1300, "height": 900}
# Notes the images that the page makes of bytes, and those whose memory it gives back.
COUNTED = """
    const make = URL.createObjectURL, revoke = URL.revokeObjectURL;
    window.made = [];
    window.revoked = 0;
    URL.createObjectURL = (blob) => { window.made.push(blob.type); return make.call(URL, blob); };
    URL.revokeObjectURL = (url) => { window.revoked += 1; revoke.call(URL, url); };
"""
PIXELS = """() => Promise.all([...document.querySelectorAll("figure img")].map(async (image) => {
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
    return [...data].filter((_, index) => index % 4 < 3);
}))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@contextmanager
def drawing_server(folder: Path) -> Iterator[str]:
    """Yield the address of an application over a tiny model with two adapters, in this process."""
    pipe = make_pipeline("flux")
    adapters = {name: make_adapter(pipe, name, ATTENTION, rank=4) for name in ("ink", "night")}
    with image_client(folder) as client, listening(client) as url:
        for name, path in save_adapters(folder, adapters).items():
            client.add(name, path, {"ink": 0.8, "night": 1.0}[name])
        yield url


@contextmanager
def listening(client: ImageClient) -> Iterator[str]:
    """Yield the address of the application of a client."""
    with listen("127.0.0.1", 0) as listener:
        config = uvicorn.Config(
            client.app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        serving = client.portal.start_task_soon(server.serve, [listener])
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            serving.result(20)


def prepare(page: Page, steps: int) -> None:
    page.get_by_label("Size").fill("64x64")
    page.get_by_label("Steps").fill(str(steps))


def run(page: Page, count: int) -> None:
    page.get_by_role("button", name=f"Run {count} columns").click()
    expect(page.get_by_text("Finished.")).to_have_count(count)


@pytest.mark.slow
def test_images_form_side_by_side_with_time_and_receipt(browser: Browser, tmp_path: Path) -> None:
    with (
        drawing_server(tmp_path) as url,
        watched_page(browser, url, viewport=WIDE) as (page, watch),
    ):
        page.add_init_script(COUNTED)
        page.goto(f"{url}/")
        prepare(page, 6)
        assert page.get_by_role("radio").count() == 0, "there is no text model"
        run(page, 3)
        made = page.evaluate("window.made")
        assert made == ["image/png"] * 12, "three partial images and the last one of each column"
        assert page.evaluate("window.revoked") == 9
        base, ink, night = page.evaluate(PIXELS)
        assert base != ink != night != base
        assert is_same(base, pixels_of(url, adapters=[]))
        assert is_same(ink, pixels_of(url, adapters=["ink"], adapter_weights=[0.8]))
        assert not is_same(ink, night)
        expect(page.get_by_role("link", name="Receipt", exact=True)).to_have_count(3)
        times = page.locator(".column footer div", has_text="time").locator("dd").all_inner_texts()
        assert all(" ms" in one or " s" in one for one in times), times
        compose_and_fail(page)
        watch.expected.append("422")
        for scheme, size in (("light", WIDE), ("dark", {"width": 390, "height": 800})):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.set_viewport_size(size)  # type: ignore[arg-type]
            assert serious(page) == [], scheme
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        look_around(page)
        watch.check()


@pytest.mark.slow
def test_the_demo_knows_the_pages_prompt_and_warns_of_others(browser: Browser) -> None:
    with (
        image_client(DEMO, family="model") as client,
        listening(client) as url,
        watched_page(browser, url, viewport=WIDE) as (page, watch),
    ):
        page.goto(f"{url}/")
        page.get_by_label("Steps").fill("2")
        page.get_by_role("button", name="Run 1 column").click()
        expect(page.get_by_text("Finished.")).to_have_count(1)
        expect(page.get_by_role("note")).to_have_count(0)
        page.get_by_label("Prompt", exact=True).fill("a red fox in the snow")
        page.get_by_role("button", name="Run 1 column").click()
        expect(page.get_by_role("note")).to_contain_text("red, in, the, snow")
        assert serious(page) == []
        watch.check()


def pixels_of(url: str, **fields: object) -> list[int]:
    """Return what a client gets for the parameters of the page."""
    body = {"prompt": "a fox on a yellow background", "seed": 1, "size": "64x64", "steps": 6}
    answer = httpx2.post(f"{url}/v1/images/generations", json=body | fields, timeout=60)
    drawn = base64.b64decode(answer.json()["data"][0]["b64_json"])
    with Image.open(io.BytesIO(drawn)) as image:
        return list(image.convert("RGB").tobytes())


def name(column: Locator, field: str, adapter: str) -> None:
    column.get_by_label(field).fill(adapter)
    column.get_by_label(field).press("Tab")


def is_same(first: list[int], second: list[int]) -> bool:
    """Whether two images differ by rounding at most: they were drawn in different batches."""
    return all(abs(a - b) <= 1 for a, b in zip(first, second, strict=True))


def compose_and_fail(page: Page) -> None:
    """Two adapters in one column, and one that does not exist in another."""
    page.get_by_label("Remove column 1").click()
    first, second = page.get_by_role("article").all()
    first.get_by_role("button", name="Add another adapter").click()
    name(first, "Column 1, adapter 2", "night")
    first.get_by_label("Column 1, weight of night").fill("0.35")
    name(second, "Column 2, adapter 1", "nothing")
    first.get_by_role("button", name="Code").click()
    code = page.get_by_role("dialog").inner_text()
    assert '"adapter_weights": [0.8, 0.35]' in code and "images.generate" in code
    assert serious(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Run 2 columns").click()
    expect(first.get_by_text("Finished.")).to_be_visible()
    expect(second.get_by_text("Adapter refused")).to_be_visible()


def look_around(page: Page) -> None:
    """Look at the other views of a server without a text model."""
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_role("heading", name="Images")).to_be_visible()
    expect(page.get_by_text("Image tokens/s")).to_be_visible()
    assert page.locator("svg.map").count() == 0
    page.get_by_role("link", name="Adapters", exact=True).click()
    page.locator(".rows .row", has_text="ink").click()
    page.get_by_role("button", name="Examine the files").click()
    expect(page.get_by_text("This adapter can be served.")).to_be_visible()
    found = page.locator(".card").filter(has=page.get_by_role("heading", name="Doctor"))
    assert "–" not in found.locator("dd").all_inner_texts()
    assert serious(page) == []


@pytest.mark.slow
def test_one_page_for_text_and_images(browser: Browser, tmp_path: Path) -> None:
    script = ROOT / "examples" / "images" / "make_tiny_model.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    flags = ["--device-memory", "512MiB", "--lora-modules", f"pirate={EXAMPLES / 'pirate'}"]
    flags += ["--image-model", str(tmp_path / "model"), "--data", str(tmp_path / "data")]
    flags += ["--image-lora", f"ink={tmp_path / 'ink.safetensors'}"]
    with (
        running_server(tmp_path / "log", *flags) as running,
        watched_page(browser, running.url, viewport=WIDE) as (page, watch),
    ):
        page.goto(f"{running.url}/")
        page.get_by_role("button", name="Run 2 columns").click()
        expect(page.get_by_role("link", name="Receipt", exact=True)).to_have_count(2)
        page.get_by_text("images", exact=True).click()
        prepare(page, 4)
        run(page, 2)
        assert serious(page) == []
        check_code(page, tmp_path)
        page.get_by_role("link", name="Receipt", exact=True).nth(1).click()
        expect(page.get_by_text("Digest of the pixels")).to_be_visible()
        assert serious(page) == []
        page.get_by_role("link", name="Live").click()
        expect(page.get_by_role("heading", name="Text")).to_be_visible()
        expect(page.get_by_role("heading", name="Images")).to_be_visible()
        assert serious(page) == []
        # The columns of both are kept while another view is open.
        page.get_by_role("link", name="Playground").click()
        expect(page.locator("figure img")).to_have_count(2)
        page.get_by_text("text", exact=True).click()
        expect(page.get_by_role("link", name="Receipt", exact=True)).to_have_count(2)
        watch.check()


def check_code(page: Page, folder: Path) -> None:
    """Run what the page shows, and compares the image with that of the page."""
    page.get_by_role("article").nth(1).get_by_role("button", name="Code").click()
    curl, python = page.get_by_role("dialog").locator("pre").all_inner_texts()
    page.keyboard.press("Escape")
    commands = [[sys.executable, "-c", python]]
    if shutil.which("curl") and shutil.which("jq"):
        commands.append(["sh", "-c", curl])
    shown = page.evaluate(PIXELS)[1]
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, timeout=60, env=dict(os.environ))
        with Image.open(folder / "image.png") as image:
            assert is_same(list(image.convert("RGB").tobytes()), shown)
