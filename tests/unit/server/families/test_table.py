"""Which API answers where: no two families collide, and each can be switched off."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loramux.config import serve
from loramux.errors import InvalidRequest
from loramux.server.context import Context, ServerOptions
from loramux.server.families.table import FAMILIES, OWN, routes_of_others
from loramux.server.generate.checked_fields import field_table
from loramux.server.http.routes import Route
from tests.unit.server.asgi_client import get, make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "other-servers.md").read_text()


def routes(**options: Any) -> list[Route]:
    backend = ScriptedBackend()
    context = Context(
        backend=backend,
        options=ServerOptions(allow_runtime_lora_updating=True, **options),
        metrics=None,  # type: ignore[arg-type]
        names=backend.names,
    )
    return routes_of_others(context)


def own_routes() -> Iterator[tuple[str, str]]:
    paths = make_app(allow_runtime_lora_updating=True).document.document["paths"]
    for path, methods in paths.items():
        own = [method for method, way in methods.items() if not {*FAMILIES, OWN} & set(way["tags"])]
        yield from ((method.upper(), path) for method in own)


def test_no_two_families_answer_the_same_body() -> None:
    groups: defaultdict[tuple[str, str], list[Route]] = defaultdict(list)
    for route in routes():
        for method in route.methods:
            groups[method, route.path].append(route)
    for group in groups.values():
        keys = [key for route in group for key in route.keys]
        assert len(keys) == len(set(keys)), group
        assert len(group) == 1 or all(route.keys for route in group), group


def test_no_family_takes_a_route_of_the_own_api() -> None:
    own = set(own_routes())
    for route in routes():
        for method in route.methods:
            if (method, route.path) in own:
                assert route.path == "/tokenize"
                assert route.keys and not route.keys & {"prompt", "messages"}


def test_the_settings_name_every_family() -> None:
    assert set(serve.FAMILIES) == set(FAMILIES)
    with pytest.raises(InvalidRequest, match="Did you mean lorax"):
        routes(compat=("lorex",))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_can_be_switched_off(name: str) -> None:
    others = tuple(one for one in FAMILIES if one != name)
    left = {route.family for route in routes(compat=others)}
    assert left == {*others, "loramux"}


def test_a_path_that_is_off_is_not_there() -> None:
    app = make_app(compat=())
    assert post(app, "/generate", {"inputs": "hi"}).status_code == 404
    assert post(app, "/tokenize", {"inputs": "hi"}).status_code == 400
    assert post(app, "/tokenize", {"prompt": "hi"}).status_code == 200
    assert get(app, "/").text == "loramux is running"


def test_a_shared_path_without_a_field_of_any_api_names_the_fields() -> None:
    response = post(make_app(), "/generate", {"x": 1})
    assert response.status_code == 400
    assert "input_ids, inputs, text" in response.json()["error"]["message"]


def test_the_page_lists_every_route_of_every_family() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE, re.MULTILINE)
    listed = {
        (family, method, path)
        for family, routes in rows
        for methods, path in re.findall(r"`([A-Z, ]+) (/\S*)`", routes)
        for method in methods.split(", ")
    }
    served = {
        (route.family, method, route.path.replace("{name:path}", "{name}"))
        for route in routes()
        for method in route.methods
    }
    assert listed == served


def test_the_page_lists_what_every_route_refuses() -> None:
    """`python scripts/write_field_table.py` writes it."""
    listed = PAGE.partition("<!-- refused -->\n")[2].partition("<!-- /refused -->")[0]
    assert listed == field_table()
