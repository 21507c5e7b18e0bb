from __future__ import annotations

from pathlib import Path

import msgspec

from loramux.backend.host import EngineStats
from loramux.engine.stats import adapter_uses, engine_stats
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.model_factory import tiny_transformers_model


def test_every_registered_adapter_is_listed_with_its_tier_and_usage(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama")
    engine = make_engine(model, tmp_path / "model", disk_folder=str(tmp_path / "disk"))
    cids = [
        engine.register_adapter(make_peft_adapter(tmp_path / str(seed), model, seed=seed)).cid
        for seed in range(3)
    ]
    prompt = make_prompt(40, seed=1)
    assert engine.residency.load_now(cids[1:])
    engine.residency.release(cids[1:])
    assert engine.memory.reclaimer.reclaim(engine.pages.num_pages)
    for name in ("first", "second"):
        run_all(engine, [make_request(name, prompt, ((cids[0], 1.0),))])
    engine.memory.tiers.host.drop(cids[2])
    engine.residency.pin(cids[0], is_pinned=True)
    uses = {use.cid: use for use in adapter_uses(engine)}
    assert [uses[cid].tier for cid in cids] == ["device", "host", "disk"]
    used = uses[cids[0]]
    assert (used.hits, used.misses, used.is_pinned) == (1, 1, True)
    assert used.cached_tokens >= 32 and used.last_use_s is not None
    assert uses[cids[1]].last_use_s is not None and uses[cids[1]].hits == 0
    stats = engine_stats(engine, num_steps=7)
    device, host, disk = stats.tiers
    assert (device.tier, device.num_adapters, device.hits, device.misses) == ("device", 1, 1, 3)
    assert device.used_bytes % engine.memory.rank.page_bytes == 0 < device.used_bytes
    assert host.num_adapters == 2 and disk.num_adapters == 3 and disk.used_bytes > 0
    assert stats.prefix_hit_tokens >= 32 and stats.prefix_query_tokens >= 78
    assert sum(stats.step_loss_s.values()) >= 1 and list(stats.step_loss_s)[-1] == "+Inf"
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats)
    assert again == stats, "it must cross the channel unchanged"
    engine.close()
