from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux import LLM, LoRARequest, SamplingParams
from loramux.config.engine import EngineConfig
from loramux.errors import AdapterRefused, InvalidRequest
from loramux.types.request import FinishReason
from tests.adapter_factory import make_peft_adapter
from tests.broken_adapters import BROKEN
from tests.engine_factory import save_model_with_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_model_with_tokenizer(folder)


@pytest.fixture(scope="module")
def llm(folder: Path, model: Any) -> LLM:
    return LLM(folder, device_memory_bytes=8 * 2**20)


@pytest.fixture(scope="module")
def adapters(model: Any, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(name, i + 1, str(make_peft_adapter(root / name, model, seed=i, lora_alpha=32)))
        for i, name in enumerate(("one", "two"))
    ]


def test_a_list_gives_each_prompt_its_own_adapter(llm: LLM, adapters: list[LoRARequest]) -> None:
    one, two = adapters
    mixed = llm.generate(["The quick"] * 3, GREEDY, lora_request=[one, None, two], use_tqdm=False)
    alone = [
        llm.generate("The quick", GREEDY, lora_request=adapter, use_tqdm=False)[0]
        for adapter in (one, None, two)
    ]
    texts = [output.outputs[0].text for output in mixed]
    assert texts == [output.outputs[0].text for output in alone]
    assert len(set(texts)) == 3
    assert [output.lora_request for output in mixed] == [one, None, two]
    assert mixed[0].adapter_cid != mixed[2].adapter_cid and mixed[1].adapter_cid is None


def test_a_mapping_of_adapters_to_weights_is_their_sum(
    llm: LLM, adapters: list[LoRARequest]
) -> None:
    one, two = adapters
    (mixed,) = llm.generate("The quick", GREEDY, lora_request={one: 1.0, two: 0.5}, use_tqdm=False)
    selections = [{two: 0.5, one: 1.0}, {one: 1.0, two: 0.0}, one, {}]
    outputs = llm.generate(["The quick"] * 4, GREEDY, lora_request=selections, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts[0] == mixed.outputs[0].text != texts[2]
    assert texts[1] == texts[2]
    assert outputs[0].selection == mixed.selection == tuple(sorted(mixed.selection))
    assert outputs[3].adapter_cid is None
    copy = LoRARequest("copy of one", 3, one.lora_path)
    with pytest.raises(InvalidRequest, match="named twice"):
        llm.generate("The quick", GREEDY, lora_request={one: 1.0, copy: 1.0}, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="got nan"):
        llm.generate("The quick", GREEDY, lora_request={one: float("nan")}, use_tqdm=False)


def test_one_lora_request_applies_to_all_prompts(llm: LLM, adapters: list[LoRARequest]) -> None:
    outputs = llm.generate(["The", "lazy dog"], GREEDY, lora_request=adapters[0], use_tqdm=False)
    assert {output.lora_request for output in outputs} == {adapters[0]}
    assert [output.prompt for output in outputs] == ["The", "lazy dog"]


@pytest.mark.parametrize(
    "prompts",
    [
        "The quick",
        {"prompt": "The quick"},
        "tokens",
        ["The quick"],
        {"prompt_token_ids": "tokens"},
        ["tokens"],
    ],
    ids=str,
)
def test_prompts_are_text_or_token_ids_single_or_in_lists(llm: LLM, prompts: Any) -> None:
    tokens = llm.tokenizer.encode("The quick")
    expected = llm.generate("The quick", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        return tokens if value == "tokens" else value

    (output,) = llm.generate(fill(prompts), GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected


def test_the_same_seed_gives_the_same_text_in_any_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.5, seed=11, max_tokens=12, ignore_eos=True)
    others = SamplingParams(temperature=1.5, max_tokens=9, ignore_eos=True)
    (alone,) = llm.generate("The quick", seeded, use_tqdm=False)
    crowd = llm.generate(
        ["a", "The quick", "dog " * 9, "b"], [others, seeded, others, others], use_tqdm=False
    )
    assert crowd[1].outputs[0].token_ids == alone.outputs[0].token_ids
    reseeded = SamplingParams(temperature=1.5, seed=12, max_tokens=12, ignore_eos=True)
    (other,) = llm.generate("The quick", reseeded, use_tqdm=False)
    assert other.outputs[0].token_ids != alone.outputs[0].token_ids


def test_n_choices_differ_and_are_numbered(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=2.0, seed=1, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate("The quick", params, use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (free,) = llm.generate("The quick", long, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=(stop,))
    (stopped,) = llm.generate("The quick", params, use_tqdm=False)
    choice = stopped.outputs[0]
    assert choice.finish_reason is FinishReason.STOP and choice.stop_reason == stop
    assert choice.text == text[: text.index(stop)]
    assert not llm.engine.has_work


def test_logprobs_of_prompt_and_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("The quick brown", params, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and output.prompt_logprobs is not None
    assert [entry.token_id for entry in logprobs] == output.outputs[0].token_ids
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in logprobs)
    followed = [entry.token_id for entry in output.prompt_logprobs]
    assert followed == output.prompt_token_ids[1:]


def test_max_tokens_zero_scores_the_prompt_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (output,) = llm.generate("The quick brown", params, use_tqdm=False)
    assert output.outputs[0].token_ids == []
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) - 1


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Stop here"}]
    (one,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    several = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert {o.outputs[0].text for o in several} == {one.outputs[0].text}


@pytest.mark.parametrize("name", ["no_weights", "replicated_layers", "another_hidden_size"])
def test_a_broken_adapter_is_refused_and_nothing_runs(
    name: str, llm: LLM, model: Any, tmp_path: Path
) -> None:
    """One case each of a missing file, an unsupported config and wrong tensors."""
    (broken,) = (one for one in BROKEN if one.name == name)
    broken.build(tmp_path / "adapter", model.config)
    bad = LoRARequest("bad", 1, str(tmp_path / "adapter"))
    with pytest.raises(AdapterRefused) as caught:
        llm.generate(["a", "b"], GREEDY, lora_request=[None, bad], use_tqdm=False)
    assert caught.value.code == broken.code
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"prompts": ["a", "b"], "lora_request": [None]}, "1 entries for 2 prompts"),
        ({"prompts": ["a"], "sampling_params": [GREEDY, GREEDY]}, "2 entries for 1 prompts"),
        ({"prompts": [[1, 2, 9999]]}, "outside the vocabulary"),
        ({"prompts": ["a " * 600]}, "Shorten the prompt"),
        ({"prompts": ["fine", ""]}, "empty"),
        (
            {"prompts": ["a"], "sampling_params": SamplingParams(logit_bias={9999: 1.0})},
            "logit_bias",
        ),
    ],
)
def test_an_invalid_call_is_refused_and_leaves_no_state(
    llm: LLM, call: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        llm.generate(**call, use_tqdm=False)
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_an_interrupted_call_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = llm.engine.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_config_or_settings_but_not_both(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        LLM(folder, config=EngineConfig(), dtype="float32")
