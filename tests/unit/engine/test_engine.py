"""The engine against PEFT, against single requests, and with little memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.engine import Engine
from loramux.errors import AdapterRefused
from loramux.types.request import Selection
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    make_peft_adapter,
    write_adapter,
)
from tests.engine_factory import (
    cpu_runner,
    make_engine,
    make_prompt,
    make_request,
    peft_logits,
    run_all,
)
from tests.model_factory import tiny_transformers_model

# PEFT says so whenever the base has nn.Linear layers; the adapter is right all the same.
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True")

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    # With the default alpha PEFT in float32 is itself 1e-4 away from PEFT in float64.
    "rslora": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ALL_LINEAR},
    "rank pattern": {"r": 3, "rank_pattern": {"o_proj": 1}, "target_modules": ALL_LINEAR},
    "alpha pattern": {
        "r": 8,
        "alpha_pattern": {"layers.1.mlp.up_proj": 32},
        "target_modules": ALL_LINEAR,
    },
    "q only": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]},
    "all-linear": {"r": 8, "target_modules": "all-linear"},
    "regex": {"r": 3, "target_modules": r".*\.(k|up)_proj"},
    "layers": {"r": 8, "target_modules": ["down_proj"], "layers_to_transform": [0, 2]},
    "fan in fan out": {"r": 8, "fan_in_fan_out": True, "target_modules": ["k_proj", "o_proj"]},
    # With a larger scale PEFT in float32 is itself 3e-4 away from PEFT in float64.
    "rank 1": {"r": 1, "lora_alpha": 2, "target_modules": ALL_LINEAR},
    "rank 3": {"r": 3, "target_modules": ["gate_proj", "up_proj"]},
    "rank 64": {"r": 64, "target_modules": ALL_LINEAR},
    "rank 128": {"r": 128, "target_modules": ["v_proj", "down_proj"]},
    "excluded": {"r": 4, "target_modules": ALL_LINEAR, "exclude_modules": ["q_proj"]},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_transformers_model("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def folders(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_peft_adapter(root / name, model, seed=number, **settings)
        for number, (name, settings) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "reference"])
def engine(
    request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    return make_engine(model, tmp_path_factory.mktemp("model"), reference_kernels=request.param)


def select(engine: Engine, folder: Path | None) -> Selection:
    return () if folder is None else ((engine.register_adapter(folder).cid, 1.0),)


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_of_single_prompts_equal_peft(
    name: str, engine: Engine, model: Any, folders: dict[str, Path]
) -> None:
    tokens = make_prompt(23, seed=5)
    (logits,) = engine.prompt_logits([(tokens, select(engine, folders[name]))])
    expected = peft_logits(model, folders[name], tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert (logits - peft_logits(model, None, tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("lengths", [(1, 1), (1, 30), (17, 17), (3, 21)])
def test_logits_of_a_batch_of_sixteen_equal_peft(
    lengths: tuple[int, int], engine: Engine, model: Any, folders: dict[str, Path]
) -> None:
    """Fourteen adapters and two base prompts of several lengths, in mixed order."""
    draw = random.Random(0)
    users: list[Path | None] = [*folders.values(), None, None]
    draw.shuffle(users)
    prompts = [make_prompt(draw.randint(*lengths), seed=i) for i in range(len(users))]
    batch = [(p, select(engine, folder)) for p, folder in zip(prompts, users, strict=True)]
    for tokens, folder, logits in zip(prompts, users, engine.prompt_logits(batch), strict=True):
        expected = peft_logits(model, folder, tokens)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    engine.check_integrity()


def test_a_base_batch_after_an_adapter_batch_has_no_adapter(
    engine: Engine, model: Any, folders: dict[str, Path]
) -> None:
    tokens = make_prompt(9, seed=1)
    engine.prompt_logits([(tokens, select(engine, folders["all-linear"]))])
    (logits,) = engine.prompt_logits([(tokens, ())])
    torch.testing.assert_close(logits, peft_logits(model, None, tokens), atol=1e-4, rtol=1e-4)


def test_a_weight_scales_an_adapter_and_two_adapters_add_up(
    engine: Engine, folders: dict[str, Path]
) -> None:
    tokens = make_prompt(9, seed=1)
    cid = engine.register_adapter(folders["plain"]).cid
    base, half, twice, full = engine.prompt_logits(
        [
            (tokens, ()),
            (tokens, ((cid, 0.0),)),
            (tokens, ((cid, 0.5), (cid, 0.5))),
            (tokens, ((cid, 1.0),)),
        ]
    )
    torch.testing.assert_close(half, base, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(twice, full, atol=1e-4, rtol=1e-4)


def test_greedy_outputs_do_not_depend_on_the_batch(model: Any, tmp_path: Path) -> None:
    """64 requests over the base and 32 adapters, staggered, with aborts, in little memory."""
    draw = random.Random(1)
    ranks = [1, 2, 4, 8]
    adapters = [
        make_peft_adapter(
            tmp_path / str(i), model, seed=i, r=ranks[i % 4], target_modules=ALL_LINEAR
        )
        for i in range(32)
    ]
    engine = make_engine(
        model, tmp_path / "model", device_memory_bytes=2 * 2**20, max_batch_tokens=48
    )
    users: list[Path | None] = [None, *adapters]
    requests = [
        make_request(
            str(i),
            make_prompt(draw.randint(1, 60), seed=i),
            select(engine, users[i % 33]),
            max_tokens=draw.randint(1, 24),
        )
        for i in range(64)
    ]
    alone = {r.request_id: run_all(engine, [r])[r.request_id] for r in requests}
    waiting, aborted = list(requests), set()
    answers: dict[str, list[int]] = {r.request_id: [] for r in requests}
    draw.shuffle(waiting)
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), draw.randint(0, 6))):
            engine.add(waiting.pop())
        for event in engine.step():
            assert event.error is None and event.token_id is not None
            answers[event.request_id].append(event.token_id)
        engine.check_integrity()
        if draw.random() < 0.2:
            victim = str(draw.randrange(64))
            engine.abort(victim)
            if len(answers[victim]) < len(alone[victim]):
                aborted.add(victim)
            engine.check_integrity()
    assert len(aborted) >= 3
    for name, answer in answers.items():
        expected = alone[name][: len(answer)] if name in aborted else alone[name]
        assert answer == expected, name
    assert engine.memory.reclaimer.reclaim(engine.pages.num_pages), "idle pages are all free to go"
    assert engine.pages.num_free == engine.pages.num_pages


@pytest.mark.slow
def test_two_hundred_adapters_are_served_by_a_pool_of_six(model: Any, tmp_path: Path) -> None:
    adapters = [
        write_adapter(
            tmp_path / str(i),
            lora_config_dict(target_modules=ALL_LINEAR),
            lora_tensors(model.config, seed=i, names=tuple(ALL_LINEAR)),
        )
        for i in range(200)
    ]
    roomy = make_engine(model, tmp_path / "model")
    pages_each = roomy.residency.num_pages(roomy.register_adapter(adapters[17]).cid)
    page_bytes = 3 * 2 * 16 * 2 * 16 * 4
    # Six adapters, and the KV of two short requests beside them.
    pool_bytes = (6 * pages_each + 4) * page_bytes
    engine = make_engine(
        model, tmp_path / "model", device_memory_bytes=pool_bytes, host_memory_bytes=2**20
    )
    assert engine.pages.num_pages == 6 * pages_each + 4
    storage = cpu_runner(engine).kv_pages.data_ptr()
    prompt = make_prompt(12, seed=0)
    requests = [
        make_request(str(i), prompt, select(engine, folder), max_tokens=3)
        for i, folder in enumerate(adapters)
    ]
    answers = run_all(engine, requests)
    assert all(len(answer) == 3 for answer in answers.values())
    device = engine.memory.costs.device
    assert device.loads >= 200 and device.evictions >= 194
    assert cpu_runner(engine).kv_pages.data_ptr() == storage and len(engine.residency) <= 6
    assert engine.memory.tiers.host.used_bytes <= 2**20
    sample = make_request("again", prompt, select(engine, adapters[17]), max_tokens=3)
    assert run_all(roomy, [sample])["again"] == answers["17"]


def test_an_adapter_larger_than_the_pool_is_refused_with_the_numbers(
    model: Any, tmp_path: Path
) -> None:
    engine = make_engine(model, tmp_path / "model", device_memory_bytes=100_000)
    folder = make_peft_adapter(tmp_path / "big", model, r=64, target_modules=ALL_LINEAR)
    with pytest.raises(AdapterRefused, match=r"takes \d+ bytes, and the page pool has \d+"):
        engine.register_adapter(folder)


def test_replaced_files_fail_only_the_waiting_request(model: Any, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path / "model", host_memory_bytes=2**14)
    kept = make_peft_adapter(tmp_path / "kept", model, seed=1)
    changed = make_peft_adapter(tmp_path / "changed", model, seed=2)
    old = select(engine, changed)
    engine.add(make_request("old", (5, 6, 7), old))
    engine.add(make_request("other", (5, 6, 7), select(engine, kept)))
    make_peft_adapter(tmp_path / "changed", model, seed=3)
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    errors = {e.request_id: e.error for e in events if e.error}
    assert list(errors) == ["old"] and "no longer holds" in errors["old"]
    assert sum(e.request_id == "other" for e in events) == 8
    assert select(engine, changed) != old
    with pytest.raises(AdapterRefused, match="no longer holds"):
        engine.catalog.read(old[0][0])
