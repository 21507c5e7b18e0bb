"""Plans over HTTP: the base's own shapes and budgets, and what is on the device now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loramux.backend.host import AdapterUse, EngineStats, Health
from loramux.capacity.plan import Budgets, Fleet, PlannedBase
from loramux.capacity.planner import plan_memory
from loramux.server.routes.plans import would_evict
from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.scripted_backend import CARD, SHAPES, ScriptedBackend, named

PLAN = "/v1/adapters/plan"
ASKED = {"adapters": 300, "rank": [8, 16], "targets": ["q", "v"], "zipf": 0.9}


def planned(**fields: Any) -> dict[str, Any]:
    response = post(make_app(), PLAN, ASKED | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_answer_is_that_of_the_planner_for_this_server() -> None:
    answer = planned()
    base = PlannedBase(name="tiny-base", shapes=SHAPES, dtype="float32")
    fleet = Fleet(num_adapters=300, ranks=(8, 16), targets=("q_proj", "v_proj"), zipf=0.9)
    budgets = Budgets(device_bytes=1 << 20, host_bytes=1 << 21, disk_bytes=1 << 22)
    expected = plan_memory(base, fleet, budgets)
    assert [tier["adapters"] for tier in answer["tiers"]] == [t.adapters for t in expected.tiers]
    assert answer["advice"] == expected.advice
    assert answer["base"]["page_bytes"] == base.page_bytes
    # A: 32 x rank, B: rank x 32, two targets in two layers of four-byte numbers.
    assert [size["bytes"] for size in answer["sizes"]] == [8192, 16384]


def test_budgets_may_be_others_than_the_servers() -> None:
    answer = planned(device_memory="64MiB", host_memory=2**27, disk_space="1GiB", kv_tokens=0)
    assert [tier["budget_bytes"] for tier in answer["tiers"]] == [2**26, 2**27, 2**30, None]
    assert answer["evicted"]["adapters"] == 0


def test_targets_may_be_one_text_and_are_qkvo_when_left_out() -> None:
    assert planned(targets="mlp")["targets"] == ["gate_proj", "up_proj", "down_proj"]
    assert planned(targets=None)["targets"] == ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"adapters": 0}, "adapters"),
        ({"adapters": "many"}, "adapters"),
        ({"rank": []}, "rank"),
        ({"rank": [8] * 2000}, "rank"),
        ({"targets": "q,quark"}, "targets"),
        ({"targets": ""}, "targets"),
        ({"zipf": 99}, "zipf"),
        ({"device_memory": "lots"}, "device_memory"),
        ({"host_memory": "9" * 400}, "host_memory"),
        ({"disk_space": -1}, "disk_space"),
        ({"kv_tokens": -5}, "kv_tokens"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    response = post(make_app(), PLAN, ASKED | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_misspelt_field_is_not_ignored() -> None:
    response = post(make_app(), PLAN, ASKED | {"device_mem": "8GiB"})
    assert response.status_code == 400 and "device_mem" in response.json()["error"]["message"]


def test_no_plan_before_the_engine_is_up() -> None:
    backend = ScriptedBackend()
    backend.health = Health.STARTING
    assert post(make_app(backend), PLAN, ASKED).status_code == 503


def test_an_adapter_may_still_be_called_plan() -> None:
    backend = ScriptedBackend()
    backend.give_name("plan", named("legal"))
    assert post(make_app(backend), "/v1/adapters/plan/pin").json()["pinned"] is True


def use(name: str, last_use_s: float | None, **fields: Any) -> AdapterUse:
    settings: dict[str, Any] = {"tier": "device", "num_bytes": 8192, "rank": 8, **fields}
    return AdapterUse(cid=name, last_use_s=last_use_s, **settings)


def test_would_evict_lists_idle_adapters_by_last_use() -> None:
    base = PlannedBase(name="b", shapes=SHAPES, dtype=CARD.dtype)
    fleet = Fleet(num_adapters=3, ranks=(8,), targets=("q_proj", "v_proj"))
    plan = plan_memory(base, fleet, Budgets(device_bytes=1 << 20))
    assert plan.tier("device").used_bytes == 3 * base.page_bytes
    uses = [
        use("new", 90.0),
        use("old", 10.0),
        use("never", None),
        use("pinned", 1.0, is_pinned=True),
        use("running", 2.0, num_running=1),
        use("elsewhere", 3.0, tier="host"),
    ]
    stats = EngineStats(num_pages=9, num_free_pages=1)
    evicted = would_evict(plan, stats, uses, {"old": "an-old-one"})
    assert (evicted.names, evicted.is_enough) == (["never", "an-old-one"], True)
    none = would_evict(plan, replace(stats, num_free_pages=3), uses, {})
    assert (none.adapters, none.is_enough) == (0, True)
    assert would_evict(plan, EngineStats(), uses, {}).adapters == 0
    full = would_evict(plan, replace(stats, num_free_pages=0), uses[3:], {})
    assert (full.adapters, full.is_enough) == (0, False)


def test_sizes_may_be_those_of_adapters_of_this_server() -> None:
    asked = {name: value for name, value in ASKED.items() if name not in ("rank", "targets")}
    backend = ScriptedBackend()
    plan = post(make_app(backend), PLAN, {**asked, "like": ["legal", "team/polite"]}).json()
    assert [size["name"] for size in plan["sizes"]] == ["legal", "team/polite"]
    assert {size["bytes"] for size in plan["sizes"]} == {1024}
    assert sum(size["count"] for size in plan["sizes"]) == asked["adapters"]
    wrong: list[tuple[dict[str, Any], int]] = [
        ({"like": ["legal"], "rank": 8}, 400),
        ({"like": []}, 400),
        ({"like": ["absent"]}, 404),
        ({}, 400),
    ]
    for fields, status in wrong:
        response = post(make_app(backend), PLAN, {**asked, **fields})
        assert response.status_code == status, response.text
        assert response.json()["error"]["param"] in ("like", "rank")
