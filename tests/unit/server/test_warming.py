from __future__ import annotations

import pytest

from loramux.backend.host import Health
from loramux.errors import AdapterNotFound
from loramux.server.live.warming import find_prewarmed, prewarm
from tests.unit.server.asgi_client import make_app, post, run
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import ScriptedBackend, named


def test_warming_generates_one_token_with_any_name_of_the_adapter(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    for name in ("acme/sql@1.0.0", cid, "legal"):
        answer = post(served.app, f"/v1/adapters/{name}/warm", {})
        assert answer.status_code == 200, answer.text
    assert served.backend.cids == [cid, cid, named("legal").cid]
    assert {request.params.max_tokens for request in served.backend.requests} == {1}
    assert post(served.app, "/v1/adapters/acme/none/warm", {}).status_code == 404


def test_warming_needs_a_ready_engine() -> None:
    backend = ScriptedBackend()
    backend.health = Health.RESTARTING
    assert post(make_app(backend), "/v1/adapters/legal/warm", {}).status_code == 503


def test_registry_names_are_prewarmed_with_all_versions_of_a_split(
    registry_app: Make, caplog: pytest.LogCaptureFixture
) -> None:
    served = registry_app()
    first, second = served.push("acme/sql@1.0.0", 1), served.push("acme/sql@1.1.0", 2)
    served.registry.split("acme/sql", {"1.0.0": 90, "1.1.0": 10}, alias="prod")
    gone = served.push("acme/gone@1.0.0", 3)
    (served.folder / "store" / "records" / gone.rpartition(":")[2]).unlink()
    last = served.push("default/chat@2.0.0", 4)
    found = find_prewarmed(served.adapters, ["acme/sql", "acme/gone@1.0.0", "chat@latest"])
    assert [resolved.cid for resolved in found] == [first, second, gone, last]
    run(prewarm(served.backend, served.backend.names, adapters=found))
    assert served.backend.prewarmed == [first, second, last]
    assert "acme/gone@1.0.0 is not pre-warmed" in caplog.text


@pytest.mark.parametrize("name", ["acme/none", "acme/sql@9.9.9", "acme/sql@beta", "no name at all"])
def test_an_unknown_prewarm_adapter_is_an_error_that_names_the_flag(
    name: str, registry_app: Make
) -> None:
    served = registry_app()
    served.push("acme/sql@1.0.0", 1)
    with pytest.raises(AdapterNotFound, match=f"--prewarm-adapters names {name!r}.*registry"):
        find_prewarmed(served.adapters, ["acme/sql", name])
