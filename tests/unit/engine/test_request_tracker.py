from __future__ import annotations

from pathlib import Path

import pytest

from loramux.engine.engine import Engine
from loramux.errors import LoramuxError
from loramux.types.request import Request, RequestFacts
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import make_engine, make_prompt, make_request
from tests.memory_factory import InlineExecutor, ManualExecutor
from tests.model_factory import tiny_transformers_model


def facts_of(engine: Engine, *requests: Request) -> dict[str, list[RequestFacts]]:
    for request in requests:
        engine.add(request)
    found: dict[str, list[RequestFacts]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            if event.facts is not None:
                found[event.request_id].append(event.facts)
    return found


def test_the_first_event_of_each_request_has_its_facts(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama")
    engine = make_engine(
        model, tmp_path / "model", disk_folder=str(tmp_path / "disk"), loads=InlineExecutor()
    )
    cids = [
        engine.register_adapter(make_peft_adapter(tmp_path / str(seed), model, seed=seed)).cid
        for seed in range(2)
    ]
    prompt = make_prompt(9, seed=1)
    facts_of(engine, make_request("load", prompt, tuple((cid, 1.0) for cid in cids)))
    assert engine.memory.reclaimer.reclaim(engine.pages.num_pages)
    engine.memory.tiers.host.drop(cids[1])
    found = facts_of(
        engine,
        make_request("base", prompt),
        make_request("host", prompt, ((cids[0], 1.0),), n=2),
        make_request("both", prompt, ((cids[0], 1.0), (cids[1], 0.5)), max_tokens=1),
    )
    assert {name: len(facts) for name, facts in found.items()} == {"base": 1, "host": 1, "both": 1}
    assert found["base"][0].tier_found is None and found["base"][0].load_s == 0
    assert found["host"][0].tier_found == "host" and found["both"][0].tier_found == "disk"
    assert found["both"][0].load_s > 0 and found["both"][0].num_distinct == 2
    assert [found[name][0].queue_depth for name in ("base", "host", "both")] == [0, 1, 3]
    assert all(facts[0].queue_s >= 0 for facts in found.values())
    warm = facts_of(engine, make_request("warm", prompt, ((cids[1], 1.0),)))["warm"][0]
    assert warm.tier_found == "device" and warm.load_s == 0


def test_an_adapter_that_is_being_read_counts_in_the_tier_that_is_read(tmp_path: Path) -> None:
    """Catches a receipt that reports disk for a load from the source folder."""
    model = tiny_transformers_model("llama")
    loads = ManualExecutor()
    engine = make_engine(model, tmp_path / "model", loads=loads)
    cid = engine.register_adapter(make_peft_adapter(tmp_path / "a", model)).cid
    engine.memory.tiers.host.drop(cid)
    engine.add(make_request("first", make_prompt(9, seed=1), ((cid, 1.0),)))
    engine.step()
    assert loads.jobs, "the load has started"
    engine.add(make_request("second", make_prompt(9, seed=2), ((cid, 1.0),)))
    found = {}
    while engine.has_work:
        loads.run_all()
        found |= {e.request_id: e.facts.tier_found for e in engine.step() if e.facts is not None}
    assert found == {"first": "source", "second": "source"}


def test_refused_and_aborted_requests_leave_no_record(tmp_path: Path) -> None:
    engine = make_engine(tiny_transformers_model("llama"), tmp_path / "model")
    with pytest.raises(LoramuxError):
        engine.add(make_request("empty", ()))
    engine.add(make_request("gone", (1, 2, 3)))
    engine.abort("gone")
    assert len(engine._tracker) == 0
