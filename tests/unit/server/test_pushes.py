"""Adapters pushed from memory: every form of a body, versions, and what stays after a failure."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loramux.adapters.peft.config import CONFIG_NAME
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.errors import AdapterRefused, StoreFull
from loramux.server.naming import pushed_folders
from loramux.server.naming.pushed_folders import PushedFolders
from loramux.server.routes import push_intake
from loramux.server.routes.push_intake import CONFIG_HEADER, OCTETS
from loramux.sources.config import FetchLimits, SourceConfig
from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import complete, get, make_app, post, request, run
from tests.unit.server.scripted_backend import ScriptedBackend, cid_of

PUSH = "/v1/adapters/policy:push"


def serve(**options: Any) -> tuple[Any, ScriptedBackend]:
    backend = ScriptedBackend()
    return make_app(backend, allow_runtime_lora_updating=True, **options), backend


def files_of(folder: Path) -> tuple[str, bytes]:
    config = json.dumps(json.loads((folder / CONFIG_NAME).read_text()))
    return config, (folder / WEIGHTS_NAME).read_bytes()


def push(app: Any, folder: Path, *, path: str = PUSH, cut: int | None = None) -> httpx2.Response:
    config, weights = files_of(folder)
    headers = {"content-type": OCTETS, CONFIG_HEADER: config}
    return request(app, "POST", path, content=weights[:cut], headers=headers)


def push_form(app: Any, folder: Path, *, leave_out: str = "") -> httpx2.Response:
    config, weights = files_of(folder)
    files: dict[str, Any] = {
        "note": ("n.txt", b"hi"),
        "config": (CONFIG_NAME, config.encode()),
        "weights": (WEIGHTS_NAME, weights),
    }
    files.pop(leave_out, None)
    return request(app, "POST", PUSH, files=files)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm."""
    folder = tmp_path_factory.mktemp("shm")
    for module in (pushed_folders, push_intake):
        monkeypatch.setattr(module, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def folders(tmp_path: Path, place: Path) -> list[Path]:
    return [write_tiny(tmp_path / str(seed), seed) for seed in range(6)]


def kept_files(place: Path) -> list[str]:
    return sorted(path.name for path in place.rglob("*") if path.is_file())


@pytest.mark.parametrize("send", [push, push_form])
def test_a_pushed_adapter_answers_the_next_request(
    folders: list[Path], place: Path, send: Any
) -> None:
    app, backend = serve()
    for number in (0, 1, 2):
        reply = send(app, folders[number])
        assert reply.status_code == 200, reply.text
        told = reply.json()
        assert (told["version"], told["cid"]) == (number + 1, cid_of(folders[number]))
        complete(app, model="policy")
        assert backend.cids[-1] == told["cid"]
        shown = get(app, "/v1/adapters/policy/version").json()
        assert shown == {"name": "policy", "version": number + 1, "cid": told["cid"]}
    # Two versions, the lock, and nothing that is on its way.
    assert kept_files(place) == sorted([CONFIG_NAME, WEIGHTS_NAME] * 2 + ["lock"])


def test_a_push_from_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_intake, "SHARED_MEMORY", tmp_path)
    folders = [write_tiny(tmp_path / str(seed), seed) for seed in range(4)]
    app, _ = serve()
    folders[0].chmod(0o700)
    for file in folders[0].iterdir():
        file.chmod(0o600)
    reply = post(app, PUSH, {"shm": "shm://0"})
    assert reply.status_code == 200 and reply.json()["cid"] == cid_of(folders[0])
    folders[1].chmod(0o770)
    assert "chmod" in post(app, PUSH, {"shm": "1"}).json()["error"]["message"]
    folders[2].chmod(0o700)
    (folders[2] / WEIGHTS_NAME).chmod(0o606)
    assert "chmod" in post(app, PUSH, {"shm": "2"}).json()["error"]["message"]
    (tmp_path / "link").symlink_to(folders[0])
    (folders[3] / WEIGHTS_NAME).unlink()
    (folders[3] / WEIGHTS_NAME).symlink_to(folders[0] / WEIGHTS_NAME)
    folders[3].chmod(0o700)
    for name in ("link", "3", "absent", "../0", ".", "a/b"):
        refused = post(app, PUSH, {"shm": name})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "shm", name
    assert get(app, "/v1/adapters/policy/version").json()["version"] == 1


def test_a_push_that_is_refused_leaves_the_old_version(folders: list[Path], place: Path) -> None:
    app, backend = serve(sources=SourceConfig(limits=FetchLimits(max_file_bytes=10_000)))
    good = push(app, folders[0]).json()
    weights = files_of(folders[1])[1]

    def send(content: bytes, **headers: str) -> int:
        given = {"content-type": OCTETS, **headers}
        return request(app, "POST", PUSH, content=content, headers=given).status_code

    config = files_of(folders[1])[0]
    assert send(weights) == 400
    assert send(weights, **{CONFIG_HEADER: "{"}) == 400
    assert send(weights, **{"content-type": "text/plain", CONFIG_HEADER: config}) == 415
    assert send(b"x" * 2_000_000, **{CONFIG_HEADER: config}) == 413
    for part in ("config", "weights"):
        assert push_form(app, folders[1], leave_out=part).json()["error"]["param"] == part
    backend.refusal = AdapterRefused("not_finite", "It has NaN values.")
    assert push(app, folders[1]).status_code == 422
    backend.refusal = None
    assert push(app, folders[1], path="/v1/adapters/tiny-base:push").status_code == 400
    complete(app, model="policy")
    assert backend.cids[-1] == good["cid"]
    assert kept_files(place) == [CONFIG_NAME, WEIGHTS_NAME, "lock"]
    # The name goes on.
    assert push(app, folders[2]).json()["version"] == 2


def test_versions_of_the_trainer_only_rise(folders: list[Path]) -> None:
    app, _ = serve()
    assert push(app, folders[0], path=f"{PUSH}?version=7").json()["version"] == 7
    late = push(app, folders[1], path=f"{PUSH}?version=7")
    assert late.status_code == 409 and "version 7" in late.json()["error"]["message"]
    assert push(app, folders[1], path=f"{PUSH}?version=x").status_code == 400
    assert get(app, "/v1/adapters/policy/version").json()["cid"] == cid_of(folders[0])
    assert push(app, folders[1]).json()["version"] == 8
    # A load by vLLM's call is no version of the trainer.
    body = {"lora_name": "policy", "lora_path": str(folders[2]), "load_inplace": True}
    assert post(app, "/v1/load_lora_adapter", body).status_code == 200
    assert get(app, "/v1/adapters/policy/version").json()["version"] == 0


def test_a_version_can_be_waited_for(folders: list[Path]) -> None:
    app, _ = serve()
    path = "/v1/adapters/policy/version"
    assert get(app, path).status_code == 404
    assert get(app, f"{path}?min_version=1&timeout_s=0").status_code == 408

    async def work() -> httpx2.Response:
        config, weights = files_of(folders[0])
        headers = {"content-type": OCTETS, CONFIG_HEADER: config}
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            waiting = asyncio.create_task(client.get(f"{path}?min_version=1"))
            await asyncio.sleep(0.05)
            await client.post(PUSH, content=weights, headers=headers)
            return await waiting

    assert run(work()).json()["version"] == 1


def test_many_pushes_at_once_end_with_the_last_and_keep_two(
    folders: list[Path], place: Path
) -> None:
    app, backend = serve()

    async def work() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            sends = []
            for number in range(20):
                config, weights = files_of(folders[number % 6])
                headers = {"content-type": OCTETS, CONFIG_HEADER: config}
                sends.append(client.post(PUSH, content=weights, headers=headers))
            return await asyncio.gather(*sends)

    told = [reply.json() for reply in run(work())]
    assert sorted(one["version"] for one in told) == list(range(1, 21))
    newest = max(told, key=lambda one: one["version"])
    assert get(app, "/v1/adapters/policy/version").json()["cid"] == newest["cid"]
    assert kept_files(place) == sorted([CONFIG_NAME, WEIGHTS_NAME] * 2 + ["lock"])


def test_an_unloaded_name_leaves_nothing_that_is_not_used(folders: list[Path], place: Path) -> None:
    app, backend = serve()
    push(app, folders[0])
    # The same content by another name may be read from the first one's files.
    push(app, folders[0], path="/v1/adapters/other:push")
    push(app, folders[1])
    assert post(app, "/v1/unload_lora_adapter", {"lora_name": "policy"}).status_code == 200
    complete(app, model="other")
    path = Path(backend.adapters[cid_of(folders[0])].path)
    assert (path / WEIGHTS_NAME).exists()
    assert post(app, "/v1/unload_lora_adapter", {"lora_name": "other"}).status_code == 200
    assert kept_files(place) == ["lock"]


def test_a_server_without_run_time_changes_has_no_such_route(folders: list[Path]) -> None:
    app = make_app(ScriptedBackend())
    assert push(app, folders[0]).status_code in (404, 405)


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    dead = tmp_path / f"loramux-pushes-{os.getuid()}-dead"
    dead.mkdir()
    (dead / "lock").touch()
    alive = PushedFolders((tmp_path,))
    first = alive.stage(10)
    assert not dead.exists() and stat.S_IMODE(first.stat().st_mode) == 0o700
    # Another process leaves it alone.
    PushedFolders((tmp_path,)).stage(10)
    assert first.exists()
    with pytest.raises(StoreFull, match="shared memory"):
        alive.stage(2**60)
