"""Adapters with their own tokenizer and chat template, from the prompt to the answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from loramux import LLM, LoRARequest, SamplingParams
from loramux.errors import AdapterRefused, InvalidRequest
from loramux.types.request import FinishReason, RequestOutput, Selection
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import make_request, save_model_with_tokenizer
from tests.tokenizer_factory import save_byte_fallback, save_byte_level

MESSAGES = [{"role": "user", "content": "The dog"}]
TEMPLATE = "{% for m in messages %}<|sql|>{{ m.content }}{% endfor %}{{ eos_token }}"
Edit = Callable[[Path], Any]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(base_folder: Path) -> Any:
    return save_model_with_tokenizer(base_folder)


@pytest.fixture(scope="module")
def llm(base_folder: Path, model: Any) -> LLM:
    return LLM(base_folder, device_memory_bytes=8 * 2**20)


@pytest.fixture(scope="module")
def plain(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an adapter without tokenizer files."""
    return make_peft_adapter(tmp_path_factory.mktemp("plain") / "adapter", model, lora_alpha=32)


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "adapter"))


def save_extended(base: Path, folder: Path, template: str = TEMPLATE, **tokens: str) -> None:
    """Save what a trainer saves that has added tokens and a template."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    tokenizer.add_tokens(["<|sql|>"])
    tokenizer.add_special_tokens({"eos_token": "<|done|>", **tokens})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def save_same(base: Path, folder: Path) -> None:
    """Save the tokenizer of the base as a trainer does: with padding and truncation."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer(["a", "a b"], padding=True, truncation=True, max_length=8)
    tokenizer.save_pretrained(folder)


def lora(folder: Path) -> LoRARequest:
    return LoRARequest(str(folder), 1, str(folder))


def chat(llm: LLM, folder: Path | None = None, **params: Any) -> RequestOutput:
    settings = SamplingParams(**{"temperature": 0, "max_tokens": 4, **params})
    request = None if folder is None else lora(folder)
    return llm.chat(MESSAGES, settings, lora_request=request, use_tqdm=False)[0]


def test_its_template_and_added_tokens_make_the_prompt(
    llm: LLM, base_folder: Path, adapter: Path
) -> None:
    base = chat(llm)
    save_extended(base_folder, adapter)
    oracle = PreTrainedTokenizerFast.from_pretrained(adapter)
    output = chat(llm, adapter)
    expected = oracle.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    assert output.prompt_token_ids == expected
    assert expected[0] == llm.tokenizer.vocab_size and oracle.eos_token_id in expected
    text = "a <|sql|> b"
    (generated,) = llm.generate(text, lora_request=lora(adapter), use_tqdm=False)
    assert generated.prompt_token_ids == oracle.encode(text)
    assert chat(llm).prompt_token_ids == base.prompt_token_ids


def test_added_tokens_become_text_and_stop_strings(
    llm: LLM, base_folder: Path, adapter: Path
) -> None:
    save_extended(base_folder, adapter)
    sql, done = llm.tokenizer.vocab_size, llm.tokenizer.vocab_size + 1
    assert chat(llm, adapter, logit_bias={sql: 100}).outputs[0].text == "<|sql|>" * 4
    stopped = chat(llm, adapter, logit_bias={sql: 100}, stop=("|sql",)).outputs[0]
    assert (stopped.text, stopped.stop_reason) == ("<", "|sql")
    ended = chat(llm, adapter, logit_bias={done: 100}).outputs[0]
    assert (ended.text, ended.finish_reason) == ("", FinishReason.STOP)
    assert len(ended.token_ids) == 1
    # The base neither knows the tokens nor ends with them.
    assert chat(llm, logit_bias={done: 100}).outputs[0].token_ids == [done] * 4


def test_the_end_of_the_base_and_of_the_generation_config_end_it_too(
    llm: LLM, base_folder: Path, adapter: Path
) -> None:
    save_extended(base_folder, adapter)
    (adapter / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    for token in (7, 9, *llm.eos_token_ids):
        output = chat(llm, adapter, logit_bias={token: 100}).outputs[0]
        assert (output.token_ids, output.finish_reason) == ([token], FinishReason.STOP)
    assert len(chat(llm, logit_bias={9: 100}).outputs[0].token_ids) == 4


def test_a_tokenizer_that_equals_the_base_is_the_base_s(
    llm: LLM, base_folder: Path, adapter: Path
) -> None:
    save_same(base_folder, adapter)
    assert (adapter / "tokenizer.json").read_bytes() != (
        base_folder / "tokenizer.json"
    ).read_bytes()
    cid = llm.register_adapter(adapter)
    assert llm.tokenizer_for([(cid, 1.0)]) is llm.tokenizer


def test_adapters_with_the_same_files_share_one_tokenizer(
    llm: LLM, base_folder: Path, adapter: Path, model: Any, tmp_path: Path
) -> None:
    save_extended(base_folder, adapter, TEMPLATE + "shared")
    other = make_peft_adapter(tmp_path / "other", model, seed=5)
    save_extended(base_folder, other, TEMPLATE + "shared")
    one, two = llm.register_adapter(adapter), llm.register_adapter(other)
    assert one != two
    assert llm.tokenizer_for([(one, 1.0)]) is llm.tokenizer_for([(two, 1.0)])
    assert llm.tokenizer_for([(one, 1.0), (two, 0.5)]) is llm.tokenizer_for([(one, 1.0)])


def test_a_sum_of_other_tokenizers_has_that_of_the_base(
    llm: LLM, base_folder: Path, plain: Path, adapter: Path, model: Any, tmp_path: Path
) -> None:
    save_extended(base_folder, adapter)
    other = make_peft_adapter(tmp_path / "other", model, seed=6)
    one, two = llm.register_adapter(adapter), llm.register_adapter(other)
    assert llm.tokenizer_for([(one, 1.0), (two, 1.0)]) is llm.tokenizer
    # A part with weight 0 changes nothing.
    assert llm.tokenizer_for([(one, 1.0), (two, 0.0)]) is not llm.tokenizer


def test_a_template_alone_goes_with_the_vocabulary_of_the_base(llm: LLM, adapter: Path) -> None:
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }} over")
    output = chat(llm, adapter)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "The dog over"
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }} go{{ pad_token }}")
    changed = chat(llm, adapter)
    assert llm.tokenizer.decode(changed.prompt_token_ids) == "The dog go"
    # The template is part of the identity.
    assert changed.adapter_cid != output.adapter_cid


def test_named_templates_are_chosen_by_the_tools(llm: LLM, adapter: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tool"}]
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = llm.tokenizer_for([(llm.register_adapter(adapter), 1.0)])
    assert tokenizer.decode(tokenizer.apply_chat_template(MESSAGES)) == "plain"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.decode(tokenizer.apply_chat_template(MESSAGES, tools=tools)) == "tool"


def save_foreign(folder: Path) -> None:
    save_byte_fallback(folder)


def swap_two_tokens(folder: Path) -> None:
    save_byte_level(folder)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    vocabulary = state["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(state))


def add_too_many_tokens(folder: Path) -> None:
    save_byte_level(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(512)])
    tokenizer.save_pretrained(folder)


def write(name: str, content: str) -> Edit:
    return lambda folder: (folder / name).write_text(content)


def link_outside(folder: Path) -> None:
    outside = folder.parent / "secret.json"
    outside.write_text("{}")
    (folder / "tokenizer.json").symlink_to(outside)


def write_huge(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(2**27)


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (save_foreign, "foreign_tokenizer"),
        (swap_two_tokens, "foreign_tokenizer"),
        (add_too_many_tokens, "foreign_tokenizer"),
        (write("tokenizer.json", "{"), "broken_tokenizer"),
        (write("tokenizer.json", "[]"), "broken_tokenizer"),
        (write("tokenizer.json", "[" * 100_000), "broken_tokenizer"),
        (write("tokenizer.json", '{"model": {"type": "BPE", "vocab": 3}}'), "broken_tokenizer"),
        (write("tokenizer_config.json", "no"), "broken_tokenizer"),
        (write("tokenizer_config.json", '{"eos_token": 5}'), "broken_tokenizer"),
        (write("tokenizer_config.json", '{"chat_template": 5}'), "broken_tokenizer"),
        (
            write("tokenizer_config.json", '{"added_tokens_decoder": {"x": "a"}}'),
            "broken_tokenizer",
        ),
        (
            write("tokenizer_config.json", '{"added_tokens_decoder": {"9999999999": "a"}}'),
            "broken_tokenizer",
        ),
        (
            write("tokenizer_config.json", json.dumps({str(name): 1 for name in range(1025)})),
            "tokenizer_too_large",
        ),
        (write("tokenizer_config.json", '{"extra_special_tokens": 1}'), "broken_tokenizer"),
        (link_outside, "link_outside"),
        (write_huge, "tokenizer_too_large"),
    ],
)
def test_what_does_not_fit_the_base_is_refused(
    llm: LLM, adapter: Path, edit: Edit, code: str
) -> None:
    edit(adapter)
    for _ in range(2):
        with pytest.raises(AdapterRefused) as refused:
            chat(llm, adapter)
        assert refused.value.code == code and refused.value.fix
    assert chat(llm).outputs[0].token_ids


def test_a_token_to_pad_with_needs_no_embedding(llm: LLM, adapter: Path) -> None:
    save_byte_level(adapter)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(adapter)
    tokenizer.add_tokens([f"<{number}>" for number in range(512 - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 512
    tokenizer.save_pretrained(adapter)
    assert chat(llm, adapter).outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="512 is outside the vocabulary of 512"):
        llm.generate("a [PAD]", lora_request=lora(adapter), use_tqdm=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{% if %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_hostile_template_refuses_the_messages_only(
    llm: LLM, adapter: Path, template: str
) -> None:
    (adapter / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequest) as refused:
        chat(llm, adapter)
    assert refused.value.param == "messages" and "open files" not in str(refused.value)
    assert llm.generate("a", lora_request=lora(adapter), use_tqdm=False)


def test_settings_do_not_name_files_of_this_machine(
    llm: LLM, base_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    save_extended(base_folder, adapter)
    foreign = save_byte_fallback(tmp_path / "foreign")
    path = adapter / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_file"] = str(foreign / "tokenizer.json")
    path.write_text(json.dumps(settings))
    assert chat(llm, adapter).prompt_token_ids[0] == llm.tokenizer.vocab_size


def test_files_that_were_replaced_after_registration_are_not_used(llm: LLM, adapter: Path) -> None:
    (adapter / "chat_template.jinja").write_text("one")
    cid = llm.register_adapter(adapter)
    (adapter / "chat_template.jinja").write_text("two")
    with pytest.raises(AdapterRefused) as refused:
        llm.tokenizer_for([(cid, 1.0)])
    assert refused.value.code == "changed_on_disk"


def test_ids_are_checked_against_the_vocabulary_of_the_adapter(llm: LLM, adapter: Path) -> None:
    engine = llm.engine
    card = replace(engine.register_adapter(adapter), cid="cidv1:sha256:wider", vocab_size=514)
    engine.catalog.adopt(card)
    own: Selection = ((card.cid, 1.0),)
    engine.add(make_request("fits", (1, 513), own, logit_bias={513: 1.0}))
    engine.abort("fits")
    for name, request in {
        "prompt": make_request("x", (1, 514), own),
        "logit_bias": make_request("x", (1,), own, logit_bias={514: 1.0}),
    }.items():
        with pytest.raises(InvalidRequest) as refused:
            engine.add(request)
        assert refused.value.param == name
    with pytest.raises(InvalidRequest, match="513 is outside the vocabulary of 512"):
        engine.add(make_request("base", (1, 513)))
    engine.forget_adapter(card.cid)


def test_before_an_activated_adapter_begins_ids_are_those_of_the_base(
    llm: LLM, adapter: Path
) -> None:
    engine = llm.engine
    registered = engine.register_adapter(adapter)
    card = replace(registered, cid="cidv1:sha256:begins", vocab_size=514, invocation_tokens=(7, 8))
    engine.catalog.adopt(card)
    own: Selection = ((card.cid, 1.0),)
    engine.add(make_request("fits", (1, 7, 8, 513), own))
    engine.abort("fits")
    for tokens in ((513, 7, 8), (1, 513)):
        with pytest.raises(InvalidRequest, match="513 is outside the vocabulary of 512"):
            engine.add(make_request("x", tokens, own))
    engine.forget_adapter(card.cid)
