"""The files of the web page: who is sent there, and what confines it."""

from __future__ import annotations

import gzip
import re

import pytest

from loramux.server.live.page import page_files
from tests.unit.server.asgi_client import get, make_app, request

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
MAX_COMPRESSED_BYTES = 300_000


def test_root_sends_browsers_to_the_page_and_answers_api_clients() -> None:
    app = make_app()
    sent = get(app, "/", headers=BROWSER)
    assert (sent.status_code, sent.headers["location"]) == (307, "ui/")
    for accept in ("*/*", "application/json"):
        answer = get(app, "/", headers={"accept": accept})
        assert (answer.status_code, answer.text) == (200, "Ollama is running")


def test_page_is_confined_and_has_no_inline_code() -> None:
    app = make_app()
    page = get(app, "/ui/")
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy
    assert "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "img-src 'self' blob:;" in policy, "images of models are blobs of the page's own"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in page.headers
    assert page.headers["cache-control"] == "no-cache"
    assert re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page.text) is None
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert links and all(link.startswith("./") for link in links)
    for link in links:
        asset = get(app, f"/ui/{link.removeprefix('./')}")
        assert asset.status_code == 200
        if "/assets/" in link:
            assert "immutable" in asset.headers["cache-control"]


def test_page_is_revalidated_and_compressed() -> None:
    app = make_app()
    page = get(app, "/ui/", headers={"accept-encoding": "gzip"})
    assert page.headers["content-encoding"] == "gzip"
    again = get(app, "/ui/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_page_is_small() -> None:
    files = page_files().values()
    assert all(gzip.decompress(file.compressed) == file.plain for file in files)
    assert sum(len(file.compressed) for file in files) < MAX_COMPRESSED_BYTES


@pytest.mark.parametrize("path", ["/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/nothing.js"])
def test_other_paths_do_not_exist(path: str) -> None:
    assert get(make_app(), path).status_code == 404


def test_without_the_page_browsers_get_the_answer_of_api_clients() -> None:
    app = make_app(ui=False)
    assert get(app, "/ui/").status_code == 404
    assert get(app, "/", headers=BROWSER).text == "Ollama is running"


def test_caller_says_what_a_key_may_do() -> None:
    found = get(make_app(), "/v1/caller").json()
    assert found["is_operator"] and "admin" in found["scopes"]
    assert (found["key_id"], found["has_registry"], found["base"]) == (None, False, "tiny-base")


def test_stored_versions_are_listed_searched_and_skipped(registry_app) -> None:  # type: ignore[no-untyped-def]
    made = registry_app()
    cid = made.push("acme/sql@1.0.0", 1)
    made.push("acme/poet@1.0.0", 2)
    made.registry.promote("acme/sql", "1.0.0", alias="prod")
    assert made.registry.catalog(tenant="other", limit=10) == []
    listed = get(made.app, "/v1/adapters?stored=1&search=sql").json()
    (entry,) = listed["data"]
    assert (entry["id"], entry["cid"], entry["state"]) == ("acme/sql@1.0.0", cid, "stored")
    assert entry["aliases"] == ["acme/sql@prod"] and listed["total"] == 1
    everything = get(made.app, "/v1/adapters?stored=1").json()["data"]
    skipped = get(made.app, "/v1/adapters?stored=1&offset=1").json()
    assert skipped["data"] == everything[1:] and skipped["total"] == len(everything)


def test_push_reports_its_progress(registry_app, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from tests.store_factory import CONFIG, write_tiny

    folder = write_tiny(tmp_path / "root" / "sql", 3, config=CONFIG)
    made = registry_app(allowed_roots=(str(tmp_path / "root"),))
    body = {"reference": "acme/sql@2.0.0", "source": str(folder)}
    answer = request(
        made.app, "POST", "/v1/adapters", json=body, headers={"accept": "text/event-stream"}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.split("\n\n")[-2].startswith("event: done\n")
    assert '"acme/sql@2.0.0"' in answer.text
    refused = request(
        made.app,
        "POST",
        "/v1/adapters",
        json={**body, "source": "/etc"},
        headers={"accept": "text/event-stream"},
    )
    assert refused.status_code == 403


def test_doctor_examines_the_folder_of_a_name(registry_app) -> None:  # type: ignore[no-untyped-def]
    made = registry_app()
    made.push("acme/sql@1.0.0", 1)
    report = get(made.app, "/v1/doctor/acme/sql@1.0.0").json()
    assert report["ok"] and str(made.folder) in report["folder"]
    assert get(made.app, "/v1/doctor/acme/none").status_code == 404
