"""A language model and an image model in one server, and each of them alone."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loramux.backend.host import EngineStats, Health
from loramux.backend.images import ImageStats
from loramux.metrics.images import ImageMetrics
from loramux.metrics.server import Metrics
from loramux.server.app import ServerApp, create_app
from loramux.server.context import Context, ServerOptions
from loramux.server.images.context import ImageContext, ImageModel
from loramux.server.routes.page import LiveFeed
from loramux.types.residency import ResidencyView, Tier, key_of_cid
from tests.unit.server.asgi_client import chat, get, post, request, run
from tests.unit.server.scripted_backend import ScriptedBackend, named
from tests.unit.server.scripted_images import ScriptedImages

METRICS = Path(__file__).parents[3] / "docs" / "metrics.md"
DRAW = "/v1/images/generations"


class Server:
    """One application over scripted engines."""

    def __init__(self, *, text: bool = True, images: bool = True, **options: Any) -> None:
        self.text, self.images = ScriptedBackend(), ScriptedImages()
        self.app: ServerApp = create_app(
            self.text if text else None,
            ServerOptions(**options),
            names=self.text.names if text else None,
            images=ImageModel(backend=self.images, names=self.images.names) if images else None,
        )

    def add(self, name: str, folder: Path, weight: float = 1.0) -> None:
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(name.encode())
        card = run(self.images.add_adapter(str(folder)))
        self.images.names.bind(name, card)
        self.images.names.set_weight(name, weight)


@pytest.fixture
def both(tmp_path: Path) -> Server:
    server = Server()
    server.add("ink", tmp_path / "ink", 0.8)
    return server


def test_both_models_answer(both: Server) -> None:
    assert chat(both.app, model="legal").status_code == 200
    drawn = post(both.app, DRAW, {"prompt": "a fox", "adapters": ["ink"]})
    assert drawn.status_code == 200, drawn.text
    (adapter,) = drawn.json()["serving"]["adapters"]
    assert (adapter["name"], adapter["weight"]) == ("ink", 0.8)
    assert drawn.headers["x-loramux-receipt"] == drawn.json()["serving"]["id"]
    assert drawn.headers["x-loramux-cid"] == adapter["cid"]
    assert drawn.json()["serving"]["base_model"] == "tiny-flux@fedcba9"


def test_models_and_adapters_say_what_they_are_for(both: Server) -> None:
    models = {one["id"]: one for one in get(both.app, "/v1/models").json()["data"]}
    assert list(models) == ["tiny-base", "legal", "team/polite", "tiny-flux", "ink"]
    assert "modality" not in models["legal"] and models["tiny-flux"]["modality"] == "image"
    ink = models["ink"]
    assert (ink["modality"], ink["parent"], ink["weight"]) == ("image", "tiny-flux", 0.8)
    assert ink["trigger_words"] == ["inked"] and ink["is_default"] is False
    assert get(both.app, "/v1/models/ink").json() == ink
    entries = {one["id"]: one for one in get(both.app, "/v1/adapters").json()["data"]}
    assert "modality" not in entries["legal"] and entries["ink"]["modality"] == "image"
    assert get(both.app, "/v1/adapters/ink").json()["modality"] == "image"


def test_health_is_that_of_the_worst_model(both: Server) -> None:
    report = get(both.app, "/health").json()
    assert report["status"] == "ready"
    assert {kind: one["status"] for kind, one in report["models"].items()} == {
        "text": "ready",
        "image": "ready",
    }
    both.images.health = Health.RESTARTING
    response = get(both.app, "/health")
    assert response.status_code == 503 and response.json()["status"] == "restarting"
    assert chat(both.app).status_code == 200
    assert post(both.app, DRAW, {"prompt": "a fox"}).status_code == 503


def test_routers_follow_the_tiers_of_both_engines(both: Server, tmp_path: Path) -> None:
    legal, ink = named("legal").cid, both.images.names.find("ink").cid
    both.text.stats = EngineStats(num_running=2, num_waiting=1, step_s=0.01)
    both.images.stats = ImageStats(num_running=3, num_waiting=4, step_s=5.0)
    both.text.residency.apply([(legal, Tier.HOST)])
    both.images.residency.apply([(ink, Tier.DEVICE)])
    first = get(both.app, "/v1/residency").json()
    assert first["full"] and first["moves"] == {key_of_cid(legal): 3, key_of_cid(ink): 5}
    assert (first["base"], first["open"], first["waiting"]) == ("tiny-base", 10, 5)
    assert first["step_s"] == 0.01

    def moved(after: dict[str, Any]) -> dict[str, Any]:
        query = {"since": after["generation"], "instance": after["instance"]}
        found: dict[str, Any] = get(both.app, "/v1/residency", params=query).json()
        return found

    both.images.residency.apply([(ink, Tier.HOST)])
    second = moved(first)
    assert not second["full"] and second["moves"] == {key_of_cid(ink): 3}
    both.text.residency.apply([(legal, Tier.GONE)])
    third = moved(second)
    assert not third["full"] and third["moves"] == {key_of_cid(legal): 0}
    # A reader that missed one report gets both moves.
    assert moved(first)["moves"] == {key_of_cid(legal): 0, key_of_cid(ink): 3}
    both.images.health, both.images.residency = Health.RESTARTING, ResidencyView()
    fourth = moved(third)
    assert fourth["full"] and fourth["moves"] == {} and fourth["state"] == "restarting"
    assert fourth["instance"] != third["instance"]


@pytest.mark.parametrize("engine", ["text", "images"])
def test_a_move_of_either_engine_answers_a_router_that_waits(both: Server, engine: str) -> None:
    first = get(both.app, "/v1/residency").json()
    cid = named("legal").cid

    async def poll() -> httpx2.Response:
        transport = httpx2.ASGITransport(both.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            query = {"since": first["generation"], "instance": first["instance"], "wait_s": 30}
            answer = asyncio.create_task(client.get("/v1/residency", params=query))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not answer.done()
            getattr(both, engine).residency.apply([(cid, Tier.DEVICE)])
            return await answer

    assert run(poll()).json()["moves"] == {key_of_cid(cid): 5}


def test_metrics_have_one_heading_and_the_series_of_both(both: Server) -> None:
    chat(both.app, model="legal")
    post(both.app, DRAW, {"prompt": "a fox", "adapters": ["ink"], "steps": 3})
    text = get(both.app, "/metrics").text
    headings = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(headings) == len(set(headings))
    section = METRICS.read_text().partition("## Images")[2].partition("## Gateways")[0]
    documented = set(re.findall(r"`(loramux:\w+)`", section))
    assert documented and documented <= {line.split()[2] for line in headings}
    series = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert series["loramux:engine_ready", "tiny-base"] == 1
    assert series["loramux:engine_ready", "tiny-flux"] == 1
    assert series["loramux:adapter_requests_total", "ink", "tiny-flux"] == 1
    assert series["loramux:adapter_requests_total", "legal", "tiny-base"] == 1
    assert series["loramux:denoise_steps_total", "tiny-flux"] == 3
    assert series["loramux:image_seconds_count", "tiny-flux"] == 1
    assert series["loramux:images_total", "stop", "tiny-flux"] == 1
    assert series["loramux:image_tokens_total", "tiny-flux"] == 4 * 4 * 3
    assert series["loramux:paused_jobs", "tiny-flux"] == 0


def test_stats_have_both(both: Server) -> None:
    stats = get(both.app, "/v1/stats").json()
    assert (stats["model"], stats["image"]["model"]) == ("tiny-base", "tiny-flux")
    assert stats["image"]["modality"] == "image"


def test_the_live_view_has_both() -> None:
    text, images = ScriptedBackend(), ScriptedImages()
    options, metrics = ServerOptions(), Metrics(text)
    image = ImageContext(
        backend=images,
        options=options,
        metrics=ImageMetrics(images, beside=metrics),
        names=images.names,
    )
    context = Context(
        backend=text, options=options, metrics=metrics, names=text.names, others=(image,)
    )

    async def first_event() -> str:
        events = LiveFeed(context, interval_s=0.01).events()
        sent = await anext(events)
        await events.aclose()
        return sent.decode()

    state = run(first_event())
    assert '"modality":"text"' in state and '"image":{"modality":"image"' in state


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/chat/completions"), ("POST", "/generate"), ("POST", "/api/chat")],
)
def test_without_a_text_model_its_routes_say_so(method: str, path: str) -> None:
    server = Server(text=False)
    response = request(server.app, method, path, json={})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message == "This server has no text model: start it with --model."
    assert post(server.app, DRAW, {"prompt": "a fox"}).status_code == 200
    assert get(server.app, "/health").json()["models"].keys() == {"image"}
    assert get(server.app, "/v1/stats").json()["modality"] == "image"
    assert get(server.app, "/metrics").status_code == 200
    paths = get(server.app, "/openapi.json").json()["paths"]
    assert DRAW in paths and "/v1/chat/completions" not in paths


def test_without_an_image_model_its_routes_say_so() -> None:
    server = Server(images=False)
    response = post(server.app, DRAW, {"prompt": "a fox"})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message == "This server has no image model: start it with --image-model."
    assert post(server.app, "/tiny-base/predict", {}).status_code == 404
    assert DRAW not in get(server.app, "/openapi.json").json()["paths"]


def test_a_failed_image_is_counted_and_has_a_receipt(both: Server, tmp_path: Path) -> None:
    both.images.adapters.clear()
    response = post(both.app, DRAW, {"prompt": "a fox", "adapters": ["ink"]})
    # The engine lost the adapter, and reads it again.
    assert response.status_code == 200
    refused = post(both.app, DRAW, {"prompt": "a fox", "adapters": ["nope"]})
    assert refused.status_code == 422
    assert "deployment 'tiny-flux' has: ['ink']" in refused.json()["error"]["message"]
