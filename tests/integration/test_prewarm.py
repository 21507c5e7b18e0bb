"""A real server brings up what its settings name, before anybody asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.registry_scene import Scene, ask, client_of, push, send


@pytest.mark.slow
def test_an_adapter_of_the_registry_is_on_the_device_before_the_first_request(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    cid = scene.make_adapter("v1", seed=1)
    scene.make_adapter("v2", seed=2)
    with scene.serving("one") as server, client_of(server) as client:
        push(client, "acme/sql@1.0.0", "v1")
        push(client, "acme/sql@1.1.0", "v2")
        send(client, "/v1/adapters/acme/sql/promote", {"version": "1.0.0"})
    given = ["--lora-modules", f"given={scene.adapters / 'v2'}"]
    names = ["--prewarm-adapters", "acme/sql@prod", "given"]
    with scene.serving("two", *given, *names) as server, client_of(server) as client:
        num_resident = 0
        while num_resident < 2:
            tiers = client.get("/v1/stats").json()["tiers"]
            num_resident = next(tier["adapters"] for tier in tiers if tier["tier"] == "device")
        for model in ("acme/sql", "given"):
            assert ask(client, model)["tier_found"] == "device"
        assert ask(client, "acme/sql")["adapter_cid"] == cid
