"""Constrained answers of an engine over a tiny random model, mixed with others."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loramux.engine.grammar.constraint import full_mask
from loramux.engine.grammar.constraints import Constraints
from loramux.engine.llm import LLM
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import InvalidRequest, LoramuxError
from loramux.types.grammar import Grammar
from loramux.types.request import FinishReason, LoRARequest, RequestOutput
from loramux.types.sampling import SamplingParams
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import (
    make_engine,
    make_prompt,
    make_request,
    run_all,
    save_model_with_tokenizer,
)
from tests.grammar_factory import random_schema

EOS = 2


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    save_model_with_tokenizer(folder)
    return LLM(folder, device="cpu", dtype="float32", device_memory_bytes=2**24)


def params(grammar: Grammar | None = None, **settings: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "max_tokens": 200, "seed": 1, **settings},
        grammar=None if grammar is None else grammar.encode(),
    )


def answer(llm: LLM, sampling: SamplingParams, prompt: str = "Say it:") -> RequestOutput:
    return llm.generate(prompt, sampling, use_tqdm=False)[0]


def test_regex(llm: LLM) -> None:
    output = answer(llm, params(Grammar("regex", "[a-z]{4} (one|two)"), n=3))
    for choice in output.outputs:
        assert re.fullmatch("[a-z]{4} (one|two)", choice.text)
        assert choice.finish_reason is FinishReason.STOP
        assert choice.stop_reason is None
    assert len({choice.text for choice in output.outputs}) > 1


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, llm: LLM) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    model = save_model_with_tokenizer(root / "model")
    return [
        LoRARequest(
            str(i), i + 1, str(make_peft_adapter(root / str(i), model, seed=i, lora_alpha=32))
        )
        for i in range(3)
    ]


MANY = [pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10)]


@pytest.mark.parametrize("part", [0, *MANY])
def test_answers_of_random_schemas_validate_on_random_adapters_in_a_mixed_batch(
    llm: LLM, adapters: list[LoRARequest], part: int
) -> None:
    draw = random.Random(part)
    schemas = [random_schema(draw) for _ in range(100)]
    free = SamplingParams(max_tokens=12, seed=5, temperature=1.0)
    sampling = [
        params(Grammar.of_schema(schema), seed=i, temperature=draw.choice([0.0, 1.0]),
               top_p=draw.choice([1.0, 0.9]), top_k=draw.choice([0, 20]), max_tokens=120)
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    chosen = [draw.choice([None, *adapters]) for _ in schemas]
    outputs = llm.generate(
        ["Say it:"] * 110, [*sampling, *[free] * 10], lora_request=[*chosen, *[None] * 10],
        use_tqdm=False,
    )  # fmt: skip
    num_finished = 0
    for schema, output in zip(schemas, outputs[:100], strict=True):
        choice = output.outputs[0]
        if choice.finish_reason is FinishReason.STOP:
            num_finished += 1
            jsonschema.validate(json.loads(choice.text), schema)
    assert num_finished >= 60
    alone = answer(llm, free)
    assert {tuple(output.outputs[0].token_ids) for output in outputs[100:]} == {
        tuple(alone.outputs[0].token_ids)
    }


def test_the_same_seed_gives_the_same_answer_with_and_without_other_rows(llm: LLM) -> None:
    sampling = params(Grammar.of_schema({"type": "array", "items": {"type": "integer"}}), seed=9)
    others = [params(Grammar("regex", "[a-z]{20}"), seed=i) for i in range(3)]
    mixed = llm.generate(["Say it:"] * 4, [others[0], sampling, *others[1:]], use_tqdm=False)[1]
    assert mixed.outputs[0].token_ids == answer(llm, sampling).outputs[0].token_ids


def test_objects_with_free_keys_do_not_repeat_one(llm: LLM) -> None:
    grammar = Grammar.of_schema({"type": "object", "additionalProperties": {"type": "null"}})
    letters = {letter: llm.tokenizer.encode(letter)[0] for letter in '{"nul:,}'}
    bias = {letters['"']: 3.0, letters[","]: 2.0, letters["}"]: -2.0}
    sampling = params(
        grammar, allowed_token_ids=(*letters.values(), EOS), logit_bias=bias, n=8, max_tokens=400
    )
    keys = [
        [key for key, _ in json.loads(choice.text, object_pairs_hook=list)]
        for choice in answer(llm, sampling).outputs
        if choice.finish_reason is FinishReason.STOP
    ]
    assert max(map(len, keys)) > 2
    assert all(len(set(one)) == len(one) for one in keys)


def test_an_answer_that_ends_by_length_says_so(llm: LLM) -> None:
    choice = answer(llm, params(Grammar("regex", "[a-z]{50}"), max_tokens=3)).outputs[0]
    assert choice.finish_reason is FinishReason.LENGTH
    assert re.fullmatch("[a-z]+", choice.text)


def test_logprobs_are_those_of_the_raw_distribution(llm: LLM) -> None:
    prompt = "Say it:"
    free = answer(llm, params(temperature=0, max_tokens=1, logprobs=5), prompt).outputs[0]
    held = answer(
        llm, params(Grammar("regex", "[q-z]"), temperature=0, max_tokens=1, logprobs=5), prompt
    ).outputs[0]
    assert free.logprobs is not None and held.logprobs is not None
    assert held.logprobs[0].top == free.logprobs[0].top
    assert held.text in "qrstuvwxyz" and held.logprobs[0].rank >= 1


def test_stop_strings_and_penalties_work_with_a_grammar(llm: LLM) -> None:
    sampling = params(Grammar("regex", "[ab]{100}"), stop=("b",), repetition_penalty=1.5)
    choice = answer(llm, sampling).outputs[0]
    assert choice.stop_reason == "b" and set(choice.text) <= {"a"}


def test_only_allowed_tokens_and_no_bad_words_are_generated(llm: LLM) -> None:
    ids = tuple(llm.tokenizer.encode("abc")[:2])
    allowed = answer(llm, params(allowed_token_ids=ids, max_tokens=30, temperature=9.0)).outputs[0]
    assert set(allowed.token_ids) == set(ids)
    run = (ids[0], ids[1])
    barred = params(
        allowed_token_ids=ids, bad_words_token_ids=(run,), max_tokens=30, temperature=9.0
    )
    tokens = answer(llm, barred).outputs[0].token_ids
    assert run not in set(zip(tokens, tokens[1:], strict=False)) and set(tokens) == set(ids)
    single = params(allowed_token_ids=ids, bad_words_token_ids=((ids[0],),), max_tokens=9)
    assert set(answer(llm, single).outputs[0].token_ids) == {ids[1]}


def test_nothing_ends_the_answer_before_min_tokens(llm: LLM) -> None:
    wanted = {EOS: 100.0}
    short = answer(llm, params(logit_bias=wanted, max_tokens=9)).outputs[0]
    assert len(short.token_ids) == 1
    long = answer(llm, params(logit_bias=wanted, max_tokens=9, min_tokens=4)).outputs[0]
    assert len(long.token_ids) == 5 and long.finish_reason is FinishReason.STOP


def test_stop_strings_are_not_looked_for_before_min_tokens(llm: LLM) -> None:
    grammar = Grammar("regex", "aaaaaa")
    choice = answer(llm, params(grammar, stop=("a",), min_tokens=3)).outputs[0]
    assert choice.text == "aaa"


def test_a_row_without_any_token_ends_its_request_only(llm: LLM) -> None:
    token = llm.tokenizer.encode("a")[0]
    empty = params(allowed_token_ids=(token,), bad_words_token_ids=((token,),))
    with pytest.raises(LoramuxError, match="No token may follow"):
        answer(llm, empty)
    assert answer(llm, params(Grammar("regex", "ok"))).outputs[0].text == "ok"


def test_a_grammar_of_unknown_tokens_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="unknown special token"):
        answer(llm, params(Grammar("lark", "start: <nope>")))
    with pytest.raises(InvalidRequest, match="Grammar"):
        answer(llm, SamplingParams(grammar="[a-z]"))
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        answer(llm, params(allowed_token_ids=(10**6,)))


def test_a_vocabulary_of_an_adapter_has_its_own_tokens_and_no_grammar() -> None:
    constraints = Constraints(64)
    constraints.use_tokenizer(Path(), (EOS,))
    named = make_request("a", (5,), allowed_token_ids=(64,), min_tokens=1)
    constraints.check(named, 65)
    with pytest.raises(InvalidRequest, match="vocabulary of 64"):
        constraints.check(named, 64)
    (made,) = constraints.make(named, None, 65)
    words = full_mask(65)
    made.restrict(words, [])
    assert made.allowed is not None and made.allowed.tolist() == [0, 0, 1]
    grammar = make_request("a", (5,), grammar=Grammar("regex", "a").encode())
    constraints.check(grammar, 64)
    for vocab_size in (63, 65):
        with pytest.raises(InvalidRequest, match="vocabulary of its own"):
            constraints.check(grammar, vocab_size)


def test_others_go_on_while_a_grammar_compiles(llm: LLM) -> None:
    engine = llm.engine
    slow = Grammar("regex", "[a-z]{3}x")
    text = slow.encode()
    compiled = engine.constraints.start(text).result()
    held: Future[Any] = Future()
    engine.constraints._compiled[text] = held
    engine.add(make_request("waits", (5, 6), grammar=text, max_tokens=8))
    engine.add(make_request("goes", (5, 6), max_tokens=2))
    seen = [event.request_id for _ in range(8) for event in engine.step()]
    assert set(seen) == {"goes"} and engine.has_work
    held.set_result(compiled)
    while engine.has_work:
        seen += [event.request_id for event in engine.step()]
    assert "waits" in seen


def test_a_preempted_sequence_keeps_its_grammar(tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path)
    # Room for about two of the four sequences at their longest.
    engine = make_engine(model, tmp_path, device_memory_bytes=2**16, block_tokens=8)
    engine.constraints.use_tokenizer(tmp_path, (EOS,))
    text = Grammar("regex", "([a-z]{9} ){8}").encode()
    requests = [
        make_request(
            str(i), make_prompt(6, i), grammar=text, max_tokens=90, temperature=1.0, seed=i
        )
        for i in range(4)
    ]
    tokenizer = Tokenizer(tmp_path)
    answers = run_all(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    for tokens in answers.values():
        assert re.fullmatch("([a-z]{9} ){8}", tokenizer.decode(tokens))
    engine.close()
