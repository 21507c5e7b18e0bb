"""Keys, tenants and limits behind two routers that resolve the names of one registry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from loramux.registry.keys import KeyRights
from loramux.registry.registry import Registry
from loramux.registry.tenants import SettingChanges
from loramux.types.access import KeyScope
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.fleet_factory import RouterOptions, RunningFleet, running_fleet, running_router
from tests.s3_server import free_ports

pytestmark = pytest.mark.slow
NUM_REPLICAS = 2
OPERATOR = "key-of-the-operator"
PER_MINUTE = 3


@dataclass
class Keyed:
    fleet: RunningFleet
    other: str
    """URL of a second router."""
    keys: dict[str, str]
    cids: dict[str, str]
    closing: ExitStack
    """Closes the clients at the end."""
    clients: dict[tuple[str, str], openai.OpenAI] = field(default_factory=dict)

    def client(self, tenant: str, url: str = "") -> openai.OpenAI:
        base = f"{url or self.fleet.url}/v1"
        key = self.keys[tenant]
        if (base, key) not in self.clients:
            client = openai.OpenAI(base_url=base, api_key=key, max_retries=0)
            self.clients[base, key] = self.closing.enter_context(client)
        return self.clients[base, key]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("fleet-keys")
    model = save_model_with_tokenizer(folder / "model")
    for seed in range(3):
        config = lora_config_dict(r=4, lora_alpha=64, base_model_name_or_path="model")
        write_adapter(folder / f"a{seed}", config, lora_tensors(model.config, seed=seed))
    data = folder / "data"
    flags = ["--model", str(folder / "model"), "--served-model-name", "base", "--dtype", "float32"]
    flags += ["--device-memory", "8MiB", "--prewarm", "0", "--data", str(data)]
    flags += ["--allowed-roots", str(folder), "--api-key", OPERATOR]
    flags += ["--allow-runtime-lora-updating"]
    registry = str(data / "registry.db")
    options = RouterOptions(["--registry", registry], {"LORAMUX_API_KEY": OPERATOR})
    with running_fleet(folder, NUM_REPLICAS, flags, options) as fleet, Registry(registry) as opened:
        scopes = frozenset({KeyScope.INFER, KeyScope.PUSH})
        keys = {
            tenant: opened.access.create_key(KeyRights(tenant=tenant, scopes=scopes)).text
            for tenant in ("acme", "globex", "small")
        }
        limits = SettingChanges(limits={"requests_per_minute": PER_MINUTE})
        opened.tenants.set("small", limits)
        cids = {
            reference: pushed(fleet.url, reference, folder / f"a{seed}")
            for seed, reference in enumerate(["acme/sql@1.0.0", "acme/sql@2.0.0", "globex/x@1.0.0"])
        }
        (port,) = free_ports(1)
        urls = [replica.url for replica in fleet.replicas]
        with running_router(folder, port, urls, options) as other, ExitStack() as closing:
            found = Keyed(fleet, other, keys | {"": OPERATOR}, cids, closing)
            wait_until_keys_work(found)
            yield found


def pushed(url: str, reference: str, source: Path) -> str:
    body = {"reference": reference, "source": str(source)}
    headers = {"authorization": f"Bearer {OPERATOR}"}
    answer = httpx2.post(f"{url}/v1/adapters", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["cid"])


def wait_until_keys_work(keyed: Keyed) -> None:
    deadline = time.monotonic() + 60
    for url in (keyed.other, *(replica.url for replica in keyed.fleet.replicas)):
        while True:
            try:
                headers = {"x-api-key": keyed.keys["small"]}
                if httpx2.get(f"{url}/v1/models", headers=headers).status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            assert time.monotonic() < deadline, url
            time.sleep(0.05)


def answer_of(keyed: Keyed, tenant: str, model: str, url: str = "") -> Any:
    client = keyed.client(tenant, url).completions.with_raw_response
    return client.create(model=model, prompt="The quick", max_tokens=2)


def test_a_tenant_uses_its_own_adapters_through_every_router(keyed: Keyed) -> None:
    for url in (keyed.fleet.url, keyed.other):
        for model in ("acme/sql", "acme/sql@2.0.0"):
            told = answer_of(keyed, "acme", model, url)
            assert told.headers["x-loramux-cid"] == keyed.cids["acme/sql@2.0.0"]
        # By its bare name too, which means another adapter for another tenant.
        assert answer_of(keyed, "globex", "x", url).headers["x-loramux-cid"]
        listed = {model.id for model in keyed.client("globex", url).models.list()}
        assert "globex/x" in listed and not any(name.startswith("acme/") for name in listed)


def test_a_foreign_adapter_is_answered_as_a_missing_one(keyed: Keyed) -> None:
    def refused(model: str) -> str:
        with pytest.raises(openai.NotFoundError) as error:
            answer_of(keyed, "globex", model)
        return error.value.response.text.replace(model, "NAME")

    assert refused("acme/sql") == refused("acme/nil") == refused("acme/sql@1.0.0")


def test_a_key_is_needed_and_scopes_hold(keyed: Keyed) -> None:
    keyed.keys["wrong"] = "lmx_wrong"
    with pytest.raises(openai.AuthenticationError):
        answer_of(keyed, "wrong", "acme/sql")
    with pytest.raises(openai.PermissionDeniedError):
        keyed.client("acme").post("/load_lora_adapter", cast_to=object, body={"lora_name": "n"})


def test_a_quota_is_relayed_with_its_retry_after(keyed: Keyed) -> None:
    """Each server counts for itself, so that both must have refused."""
    with pytest.raises(openai.RateLimitError) as error:
        # On a slow machine the first ones count no more at the end.
        for _ in range(100 * NUM_REPLICAS * PER_MINUTE):
            answer_of(keyed, "small", "base")
    headers = error.value.response.headers
    assert 0 < float(headers["retry-after"]) <= 60 and "x-loramux-replica" in headers
    # Other tenants have their own.
    assert answer_of(keyed, "acme", "acme/sql").headers["x-loramux-replica"]


def test_both_routers_follow_a_roll_out_through_one(keyed: Keyed) -> None:
    headers = {"x-api-key": keyed.keys["acme"]}
    for version in ("1.0.0", "2.0.0", "1.0.0"):
        body = {"version": version, "warm": True}
        url = f"{keyed.fleet.url}/v1/adapters/acme/sql/promote"
        told = httpx2.post(url, json=body, headers=headers, timeout=60).json()
        assert told["settled"], told
        expected = keyed.cids[f"acme/sql@{version}"]
        for _ in range(6):
            assert answer_of(keyed, "acme", "acme/sql").headers["x-loramux-cid"] == expected
        # The other router has the registry's feed as well.
        deadline = time.monotonic() + 10
        while (
            answer_of(keyed, "acme", "acme/sql", keyed.other).headers["x-loramux-cid"] != expected
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_restarted_replica_is_warmed_with_its_own(keyed: Keyed) -> None:
    for tenant, model in (("acme", "acme/sql@1.0.0"), ("acme", "acme/sql@2.0.0"), ("globex", "x")):
        for _ in range(3):
            answer_of(keyed, tenant, model)
    restarted = keyed.fleet.replicas[0]
    restarted.kill()
    restarted.start()
    keyed.fleet.wait_until_ready(NUM_REPLICAS)
    headers = {"x-api-key": OPERATOR}
    deadline = time.monotonic() + 240
    cids = set(keyed.cids.values())
    while True:
        told = httpx2.get(f"{restarted.url}/v1/adapters", headers=headers, timeout=30).json()
        found = {one["cid"] for one in told["data"] if one["tier"] == "device"}
        own = own_of(restarted.url, [replica.url for replica in keyed.fleet.replicas], cids)
        if own <= found:
            break
        assert time.monotonic() < deadline, (own, told)
        time.sleep(0.1)


def own_of(url: str, urls: list[str], cids: set[str]) -> set[str]:
    """Return the adapters that the hash gives to one of the replicas."""
    from loramux.router.fleet import Fleet, Replica, State
    from loramux.types.residency import key_of_cid

    fleet = Fleet([Replica(name=one, url=one, state=State.READY) for one in urls])
    own = fleet.replicas[url]
    return {cid for cid in cids if fleet.homes_of((key_of_cid(cid),), now=0, count=1) == [own]}
