from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.engine.memory import STALL_BUCKETS_S, StallHistogram
from loramux.errors import AdapterNotFound
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.model_factory import tiny_transformers_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_transformers_model("llama")


def test_stalls_are_counted_in_buckets_with_inclusive_upper_bounds() -> None:
    histogram = StallHistogram()
    for seconds in (0.00005, STALL_BUCKETS_S[0], 0.002, 5.0):
        histogram.add(seconds)
    assert histogram.counts[0] == 2 and histogram.counts[3] == 1 and histogram.counts[-1] == 1
    assert sum(histogram.counts) == 4 and histogram.total_s == pytest.approx(5.00215)


def test_unload_frees_every_tier_and_a_request_in_flight_finishes_right(
    model: Any, tmp_path: Path
) -> None:
    engine = make_engine(model, tmp_path / "model", disk_folder=str(tmp_path / "disk"))
    before = (engine.pages.num_free, engine.memory.tiers.host.used_bytes)
    folder = make_peft_adapter(tmp_path / "adapter", model, seed=1)
    cid = engine.register_adapter(folder).cid
    prompt = make_prompt(40, seed=1)
    expected = run_all(engine, [make_request("alone", prompt, ((cid, 1.0),))])["alone"]
    engine.add(make_request("flight", prompt, ((cid, 1.0),)))
    answer = [event.token_id for event in engine.step()]
    assert not engine.forget_adapter(cid), "it is in use"
    while engine.scheduler.has_work:
        answer += [event.token_id for event in engine.step()]
    assert answer == expected
    assert engine.forget_adapter(cid)
    assert (engine.pages.num_free, engine.memory.tiers.host.used_bytes) == before
    engine.check_integrity()
    with pytest.raises(AdapterNotFound):
        engine.add(make_request("late", prompt, ((cid, 1.0),)))
    engine.close()


def test_a_second_engine_finds_the_packed_images_on_disk(model: Any, tmp_path: Path) -> None:
    folder = make_peft_adapter(tmp_path / "adapter", model, seed=1)
    prompt = make_prompt(9, seed=1)
    answers = []
    for num_hits in (0, 1):
        engine = make_engine(
            model, tmp_path / "model", disk_folder=str(tmp_path / "disk"), host_memory_bytes=2**20
        )
        cid = engine.register_adapter(folder).cid
        answers.append(run_all(engine, [make_request("a", prompt, ((cid, 1.0),))]))
        assert engine.memory.tiers.disk is not None
        assert engine.memory.tiers.disk.counters.hits == num_hits
        engine.close()
    assert answers[0] == answers[1]


def test_the_first_load_uses_the_bytes_that_were_identified(model: Any, tmp_path: Path) -> None:
    """Catches a load that fails because the folder was replaced by the next version meanwhile."""
    engine = make_engine(model, tmp_path / "model")
    prompt = make_prompt(9, seed=1)
    folder = make_peft_adapter(tmp_path / "adapter", model, seed=1)
    old = engine.register_adapter(folder).cid
    make_peft_adapter(folder, model, seed=2)
    new = engine.register_adapter(folder).cid
    names = {"old": old, "new": new}
    answers = run_all(engine, [make_request(n, prompt, ((c, 1.0),)) for n, c in names.items()])
    assert answers["old"] != answers["new"]
    assert engine.memory.costs.source.loads == 2, "the files were read again"
    engine.check_integrity()
    engine.close()


def test_an_image_that_does_not_fit_into_host_memory_is_not_kept(
    model: Any, tmp_path: Path
) -> None:
    engine = make_engine(model, tmp_path / "model", host_memory_bytes=2**10)
    cid = engine.register_adapter(make_peft_adapter(tmp_path / "adapter", model)).cid
    assert cid not in engine.memory.tiers.host and engine.memory.tiers.host.used_bytes == 0
    engine.check_integrity()
    engine.close()
