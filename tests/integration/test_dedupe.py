"""Two tenants push identical bytes: one copy on disk, one place in memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loramux.store.store import ContentStore
from tests.registry_scene import Scene, ask, client_of, push

TENANTS = ("alice", "bob")
TIERS = ("device", "host")
RANK = 16
DEADLINE_S = 60.0


def memory(client: httpx2.Client, num_adapters: int) -> dict[str, int]:
    """Bytes in each tier, once the engine has told of so many adapters there."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        stats: dict[str, Any] = client.get("/v1/stats").json()
        tiers = {tier["tier"]: tier for tier in stats["tiers"] if tier["tier"] in TIERS}
        if all(tier["adapters"] == num_adapters for tier in tiers.values()):
            return {name: tier["used_bytes"] for name, tier in tiers.items()}
    raise AssertionError(f"there are not {num_adapters} adapters: {tiers}")


def disk_bytes(folder: Path) -> int:
    """Return what the files take, each inode once."""
    files = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if is_file(path)}
    return sum(files.values())


def is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def figures(scene: Scene, client: httpx2.Client, *, num_adapters: int) -> dict[str, int]:
    store = scene.data / "store"
    return {
        "store": ContentStore(store).size_bytes(),
        "disk": disk_bytes(store),
        **memory(client, num_adapters),
    }


@pytest.mark.slow
def test_identical_adapters_of_two_tenants_are_kept_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy for each tenant would double every figure; other bytes must add to them."""
    scene = Scene(tmp_path)
    cid = scene.make_adapter("same", seed=1, rank=RANK)
    other_cid = scene.make_adapter("other", seed=2, rank=RANK)
    told = {}
    with scene.serving("dedupe") as server, client_of(server) as client:
        told["empty"] = figures(scene, client, num_adapters=0)
        for tenant in TENANTS:
            assert push(client, f"{tenant}/flagger@1.0.0", "same") == cid
            receipt = ask(client, f"{tenant}/flagger")
            assert receipt["adapter_cid"] == cid
            assert receipt["adapters"][0]["tenant"] == tenant
            told[tenant] = figures(scene, client, num_adapters=1)
        assert receipt["tier_found"] == "device", "the second tenant's was loaded again"
        assert push(client, "bob/other@1.0.0", "other") == other_cid
        ask(client, "bob/other")
        told["other bytes"] = figures(scene, client, num_adapters=2)
        entries = client.get("/v1/adapters").json()["data"]
        assert [entry["cid"] for entry in entries].count(cid) == 1
    with capsys.disabled():
        print(*(f"\n{when}: {what}" for when, what in told.items()))
    assert told["alice"] == told["bob"]
    for name in told["empty"]:
        assert told["empty"][name] < told["bob"][name] < told["other bytes"][name], name
    # Read when the other one is there too, so that no late figure of the second tenant's is missed.
    for tier in TIERS:
        assert told["other bytes"][tier] == 2 * told["alice"][tier], tier
