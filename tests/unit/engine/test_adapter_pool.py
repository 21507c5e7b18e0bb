from __future__ import annotations

from pathlib import Path

import pytest

from loramux import AdapterPool
from loramux.errors import AdapterNotFound, DoesNotFit, InvalidRequest
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import save_model_with_tokenizer


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> AdapterPool:
    folder = tmp_path_factory.mktemp("pool")
    model = save_model_with_tokenizer(folder / "model")
    for seed in range(4):
        make_peft_adapter(folder / str(seed), model, seed=seed)
    pool = AdapterPool(
        base=folder / "model",
        max_active_adapters=2,
        eviction="lru",
        device_memory_bytes=8 * 2**20,
    )
    for seed in range(4):
        pool.add(folder / str(seed))
    return pool


def test_adapters_are_served_by_cid_and_the_number_of_active_ones_is_capped(
    pool: AdapterPool,
) -> None:
    cids = [use.cid for use in pool.adapters()]
    request = {"prompt": "hello", "temperature": 0, "max_tokens": 4}
    texts = {cid: pool.serve(request, adapter_cid=cid).text for cid in cids}
    assert sum(use.tier == "device" for use in pool.adapters()) == 2
    again = pool.serve(request, adapter_cid=cids[0])
    assert again.text == texts[cids[0]] and again.serving["cold_miss"]
    warm = pool.serve(request, adapter_cid=cids[0]).serving
    assert not warm["cold_miss"] and warm["adapter_cid"] == cids[0]
    assert warm["latency_ms"] > 0 and warm["pool_id"] == "local" and warm["queue_depth"] == 0
    base = pool.serve("hello")
    assert base.serving["adapter_cid"] is None and "@" in base.serving["base_model"]


def test_a_sum_of_adapters_is_served_and_one_that_never_fits_is_refused(pool: AdapterPool) -> None:
    first, second, third, _ = (use.cid for use in pool.adapters())
    request = {"prompt": "hello", "temperature": 0, "max_tokens": 6}
    mixed = pool.serve(request, adapters={first: 1.0, second: -0.5, third: 0.0})
    assert mixed.text == pool.serve(request, adapters={second: -0.5, first: 1.0}).text
    assert mixed.text != pool.serve(request, adapter_cid=first).text
    assert mixed.serving["adapter_cid"] == first
    weights = [entry["weight"] for entry in mixed.serving["adapters"]]
    assert weights == [1.0, -0.5, 0.0]
    with pytest.raises(DoesNotFit, match="3 adapters"):
        pool.serve(request, adapters={first: 1, second: 1, third: 1})
    with pytest.raises(InvalidRequest, match="either"):
        pool.serve(request, adapter_cid=first, adapters={second: 1.0})


def test_the_same_bytes_from_two_folders_are_one_adapter(pool: AdapterPool, tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    known = {use.cid for use in pool.adapters()}
    assert pool.add(make_peft_adapter(tmp_path / "copy", model, seed=1)) in known
    assert len(pool.adapters()) == 4


def test_invalid_requests_are_refused(pool: AdapterPool) -> None:
    with pytest.raises(AdapterNotFound):
        pool.serve("hello", adapter_cid="cidv1:sha256:00")
    with pytest.raises(InvalidRequest, match="exactly one of"):
        pool.serve({"temperature": 0})
    with pytest.raises(InvalidRequest, match="Unknown fields: temprature"):
        pool.serve({"input": "hello", "temprature": 0})
    with pytest.raises(InvalidRequest, match="max_tokens"):
        pool.serve({"input": "hello", "max_tokens": "many"})


def test_a_removed_adapter_is_unknown(pool: AdapterPool, tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    cid = pool.add(make_peft_adapter(tmp_path / "extra", model, seed=9))
    pool.serve("hello", adapter_cid=cid)
    pool.remove(cid)
    with pytest.raises(AdapterNotFound):
        pool.serve("hello", adapter_cid=cid)


def test_messages_are_in_the_template_of_the_adapter(pool: AdapterPool, tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    folder = make_peft_adapter(tmp_path / "adapter", model, seed=9)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    cid = pool.add(folder)
    request = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    own = pool.serve(request, adapter_cid=cid).output.prompt_token_ids
    assert own == pool.serve("hello<|im_end|>").output.prompt_token_ids
    assert pool.serve(request).output.prompt_token_ids != own
    pool.remove(cid)
