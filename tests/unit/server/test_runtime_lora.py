"""vLLM's routes that load and unload adapters: status, body and text of each response."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loramux.backend.text import Delta
from loramux.errors import AdapterRefused, EngineBusy, EngineStopped
from loramux.server.naming.pins import NameLocks
from loramux.sources.config import FetchLimits, SourceConfig
from loramux.types.adapter import AdapterCard
from loramux.types.request import Request
from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import (
    complete,
    get,
    make_app,
    post,
    request,
    run,
)
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import Script, ScriptedBackend, cid_of, named

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
INVALID = "InvalidUserInput"


def serve(**options: Any) -> tuple[Any, ScriptedBackend]:
    backend = ScriptedBackend()
    return make_app(backend, allow_runtime_lora_updating=True, **options), backend


# path, body, status, type, message, param
REFUSALS: dict[str, tuple[str, Any, int, str, str, str | None]] = {
    "no name": (
        LOAD,
        {"lora_name": "", "lora_path": "/x"},
        *(400, INVALID, "Both 'lora_name' and 'lora_path' must be provided.", None),
    ),
    "no path": (
        LOAD,
        {"lora_name": "a", "lora_path": ""},
        *(400, INVALID, "Both 'lora_name' and 'lora_path' must be provided.", None),
    ),
    "loaded already": (
        LOAD,
        {"lora_name": "legal", "lora_path": "/x"},
        *(400, INVALID),
        "The lora adapter 'legal' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True.",
        None,
    ),
    "nothing there": (
        LOAD,
        {"lora_name": "a", "lora_path": "/no/such/folder"},
        *(404, "NotFoundError", "Loading lora a failed: No adapter found for <path>", None),
    ),
    "a field is missing": (
        LOAD,
        {"lora_name": "a"},
        *(400, "Bad Request", "1 validation error: body.lora_path: Field required"),
        "body.lora_path",
    ),
    "two fields are missing": (
        LOAD,
        {},
        *(400, "Bad Request"),
        "2 validation errors: body.lora_name: Field required; body.lora_path: Field required",
        "body.lora_name",
    ),
    "wrong type": (
        LOAD,
        {"lora_name": "a", "lora_path": 1},
        *(400, "Bad Request"),
        "1 validation error: body.lora_path: Expected `str`, got `int`",
        "body.lora_path",
    ),
    "wrong switch": (
        LOAD,
        {"lora_name": "a", "lora_path": "b", "load_inplace": "yes"},
        *(400, "Bad Request"),
        "1 validation error: body.load_inplace: Expected `bool`, got `str`",
        "body.load_inplace",
    ),
    "unload without a name": (
        UNLOAD,
        {"lora_name": ""},
        *(400, INVALID, "'lora_name' needs to be provided to unload a LoRA adapter.", None),
    ),
    "unload of an unknown name": (
        UNLOAD,
        {"lora_name": "x"},
        *(404, "NotFoundError", "The lora adapter 'x' cannot be found.", None),
    ),
    "unload without the field": (
        UNLOAD,
        {"lora_int_id": 1},
        *(400, "Bad Request", "1 validation error: body.lora_name: Field required"),
        "body.lora_name",
    ),
    "unload of the base": (
        UNLOAD,
        {"lora_name": "tiny-base"},
        *(404, "NotFoundError", "The lora adapter 'tiny-base' cannot be found.", None),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_have_vllms_status_and_body(case: str) -> None:
    path, body, status, kind, message, param = REFUSALS[case]
    app, backend = serve()
    response = post(app, path, body)
    assert response.status_code == status
    error = {"message": message, "type": kind, "param": param, "code": status}
    # Operators for Kubernetes read them at the top level.
    assert response.json() == {"error": error, **error}
    assert [given.name for given in backend.names.given()] == ["legal", "team/polite"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'"x"'])
def test_a_body_that_is_not_an_object_is_one_validation_error(body: bytes) -> None:
    app, _ = serve()
    error = post(app, LOAD, body).json()["error"]
    assert (error["code"], error["type"], error["param"]) == (400, "Bad Request", "body")
    assert error["message"].startswith("1 validation error: body: ")


def test_another_content_type_is_a_validation_error() -> None:
    app, _ = serve()
    headers = {"content-type": "text/plain"}
    response = request(app, "POST", LOAD, content=b"{}", headers=headers)
    assert response.status_code == 400 and response.json()["error"]["type"] == "Bad Request"


def test_an_adapter_is_loaded_and_unloaded(tmp_path: Path) -> None:
    app, backend = serve()
    body = {"lora_name": "new", "lora_path": str(write_tiny(tmp_path / "a"))}
    response = post(app, LOAD, body)
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'new' added successfully."
    assert response.headers["content-type"].startswith("text/plain")
    assert complete(app, model="new").json()["model"] == "new"
    entry = get(app, "/v1/models/new").json()
    assert (entry["root"], entry["parent"]) == (body["lora_path"], "tiny-base")

    response = post(app, UNLOAD, {"lora_name": "new", "lora_int_id": 1})
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'new' removed successfully."
    assert complete(app, model="new").status_code == 404


def test_a_load_has_read_the_weights_when_it_returns(tmp_path: Path) -> None:
    """Catches requests that fail because the caller overwrites the folder after the call."""
    app, backend = serve()
    folder = write_tiny(tmp_path / "a")
    assert post(app, LOAD, {"lora_name": "new", "lora_path": str(folder)}).status_code == 200
    assert backend.cids == [cid_of(folder)]
    backend.script = failing(EngineBusy("The queue is full."))
    body = {"lora_name": "other", "lora_path": str(folder)}
    assert post(app, LOAD, body).status_code == 200, "the name is registered all the same"


def failing(error: Exception) -> Script:
    async def script(request: Request) -> AsyncIterator[Delta]:
        raise error
        yield

    return script


def test_delete_unloads_too(tmp_path: Path) -> None:
    app, backend = serve()
    response = request(app, "DELETE", UNLOAD, json={"lora_name": "legal"})
    assert response.status_code == 200 and backend.names.find("legal") is None
    assert backend.removed == [named("legal").cid]


def test_a_reload_in_place_moves_the_name_to_a_new_content_id(tmp_path: Path) -> None:
    app, backend = serve()
    folder = write_tiny(tmp_path / "a", 1)
    body = {"lora_name": "rl", "lora_path": str(folder), "load_inplace": True}
    assert post(app, LOAD, body).status_code == 200
    before = complete(app, model="rl").json()["serving"]["adapter_cid"]
    write_tiny(folder, 2)
    assert post(app, LOAD, body).text == "Success: LoRA adapter 'rl' added successfully."
    after = complete(app, model="rl").json()["serving"]["adapter_cid"]
    assert after == cid_of(folder) != before and backend.removed == [before]


REFUSED_ADAPTERS = {
    "is greater than max_lora_rank": AdapterRefused("rank_over_cap", "x has rank 64; at most 8."),
    "is not valid JSON": AdapterRefused("config_not_json", "adapter_config.json is not valid JSON"),
}


@pytest.mark.parametrize("phrase", REFUSED_ADAPTERS)
def test_a_refused_adapter_is_400_with_vllms_phrase(phrase: str) -> None:
    app, backend = serve()
    backend.refusal = REFUSED_ADAPTERS[phrase]
    response = post(app, LOAD, {"lora_name": "a", "lora_path": "/secret/place"})
    error = response.json()["error"]
    assert response.status_code == error["code"] == 400
    assert error["type"] == "BadRequestError" and phrase in error["message"]
    assert str(backend.refusal) in error["message"]


def test_paths_are_masked_and_a_folder_without_config_is_not_found() -> None:
    app, backend = serve()
    body = {"lora_name": "a", "lora_path": "/secret/place"}
    backend.refusal = AdapterRefused("truncated", "/secret/place/x.safetensors is truncated.")
    assert "/secret" not in post(app, LOAD, body).text
    backend.refusal = AdapterRefused("config_missing", "There is no adapter_config.json.")
    assert post(app, LOAD, body).status_code == 404


@pytest.mark.parametrize("name", ["tiny-base", "cidv1:sha256:" + "a" * 64])
def test_a_name_that_would_not_select_the_adapter_is_refused(name: str, tmp_path: Path) -> None:
    app, backend = serve()
    body = {"lora_name": name, "lora_path": str(write_tiny(tmp_path / "a"))}
    error = post(app, LOAD, body).json()["error"]
    assert (error["code"], error["type"]) == (400, INVALID) and not backend.added


@pytest.mark.parametrize(
    "name", ["a\nb", "a\x1b[2J", "a,b", " ", "sql ", "x" * 257, "acme/sql@1.0.0", "acme/sql", "sql"]
)
def test_names_that_could_be_taken_for_others_are_refused(
    name: str, registry_app: Make, tmp_path: Path
) -> None:
    served = registry_app(allow_runtime_lora_updating=True)
    served.push("acme/sql@1.0.0", 1)
    served.push("default/sql@1.0.0", 2)
    body = {"lora_name": name, "lora_path": str(write_tiny(tmp_path / "a"))}
    error = post(served.app, LOAD, body).json()["error"]
    assert (error["code"], error["type"]) == (400, INVALID) and not served.backend.added
    assert post(served.app, LOAD, {**body, "lora_name": "own"}).status_code == 200


def test_locks_of_names_are_forgotten() -> None:
    async def use() -> None:
        locks, order = NameLocks(), []

        async def call(number: int) -> None:
            async with locks.held("a"):
                order.append(number)
                await asyncio.sleep(0)
                order.append(number)

        await asyncio.gather(*map(call, range(3)))
        assert order == [0, 0, 1, 1, 2, 2] and not len(locks)

    run(use())


def test_unsupported_fields_are_refused() -> None:
    app, backend = serve()
    body = {"lora_name": "a", "lora_path": "/x", "is_3d_lora_weight": True}
    assert "is_3d_lora_weight" in post(app, LOAD, body).json()["error"]["message"]
    assert not backend.added


def test_the_routes_exist_only_if_enabled() -> None:
    app = make_app()
    for method, path in [("POST", LOAD), ("POST", UNLOAD), ("DELETE", UNLOAD)]:
        assert request(app, method, path, json={"lora_name": "legal"}).status_code == 404


def test_with_roots_a_path_must_be_under_one(tmp_path: Path) -> None:
    inside = write_tiny(tmp_path / "root" / "a")
    outside = write_tiny(tmp_path / "other")
    (tmp_path / "root" / "link").symlink_to(outside)
    app, backend = serve(allowed_roots=(str(tmp_path / "root"),))
    for path in (outside, tmp_path / "root" / ".." / "other", tmp_path / "root" / "link"):
        response = post(app, LOAD, {"lora_name": "b", "lora_path": str(path)})
        assert response.status_code == 403, path
    for name, path in [("a", str(inside)), ("b", "a")]:
        assert post(app, LOAD, {"lora_name": name, "lora_path": path}).status_code == 200
    assert post(app, LOAD, {"lora_name": "c", "lora_path": "a\0b"}).status_code == 422
    missing = {"lora_name": "c", "lora_path": "nothing"}
    assert post(app, LOAD, missing).json()["error"]["message"].endswith("<path>")
    assert backend.added == [str(inside)] * 2


def test_a_local_adapter_over_the_size_limit_is_refused_unread(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    os.truncate(folder / "adapter_model.safetensors", 10_001)
    app, backend = serve(sources=SourceConfig(limits=FetchLimits(max_file_bytes=10_000)))
    response = post(app, LOAD, {"lora_name": "a", "lora_path": str(folder)})
    assert "--max-adapter-size" in response.json()["error"]["message"]
    assert backend.added == []


def test_a_folder_that_becomes_a_link_after_its_check_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "root" / "a")
    app, backend = serve(allowed_roots=(str(tmp_path / "root"),))
    add, before = backend.add_adapter, dict(backend.adapters)

    async def swapped(path: str) -> AdapterCard:
        card = await add(path)
        return replace(card, path=str(tmp_path / "other"))

    backend.add_adapter = swapped  # type: ignore[method-assign]
    response = post(app, LOAD, {"lora_name": "a", "lora_path": str(folder)})
    assert "replaced by a link" in response.json()["error"]["message"]
    assert backend.names.find("a") is None and backend.adapters == before


def test_of_two_concurrent_loads_the_second_is_refused(tmp_path: Path) -> None:
    import httpx2

    app, backend = serve()
    body = {"lora_name": "a", "lora_path": str(write_tiny(tmp_path / "a"))}

    async def both() -> list[int]:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = await asyncio.gather(*(client.post(LOAD, json=body) for _ in range(2)))
        return sorted(answer.status_code for answer in answers)

    assert run(both()) == [200, 400]
    assert len(backend.added) == 1


def test_a_dead_engine_is_503() -> None:
    app, backend = serve()
    backend.refusal = EngineStopped("It died.")
    response = post(app, LOAD, {"lora_name": "a", "lora_path": "/x"})
    assert response.status_code == 503 and "retry-after" in response.headers


def test_production_stacks_operator_takes_a_second_load_for_a_success() -> None:
    """It reads both fields at the top level of the body."""
    app, _ = serve()
    told = post(app, LOAD, {"lora_name": "legal", "lora_path": "/x"})
    assert told.status_code == 400 and told.json()["type"] == "InvalidUserInput"
    assert "has already been loaded" in told.json()["message"]
