from __future__ import annotations

from loramux.backend import Health
from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import ScriptedBackend


def test_an_adapter_is_used_once_by_any_of_its_names(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    for name in ("acme/sql@1.0.0", cid, "legal"):
        answer = post(served.app, f"/v1/adapters/{name}/warm", {})
        assert answer.status_code == 200, answer.text
    assert [job.adapter for job in served.backend.jobs] == [cid, cid, "legal"]
    assert {job.params.max_tokens for job in served.backend.jobs} == {1}
    assert post(served.app, "/v1/adapters/acme/none/warm", {}).status_code == 404


def test_a_server_that_is_not_ready_warms_nothing() -> None:
    backend = ScriptedBackend()
    backend.health = Health.RESTARTING
    assert post(make_app(backend), "/v1/adapters/legal/warm", {}).status_code == 503
