from __future__ import annotations

import math

import msgspec
import pytest

from loramux.errors import InvalidRequest
from loramux.types.request import LoRARequest, Request
from loramux.types.sampling import SamplingParams
from loramux.types.step import Chunk, StepPlan
from tests.chunk_factory import make_chunk

OUT_OF_RANGE = [
    {"n": 0},
    {"n": 129},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_p": math.nan},
    {"top_k": -2},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": math.inf},
    {"frequency_penalty": 2.1},
    {"presence_penalty": -2.1},
    {"logit_bias": {5: 100.5}},
    {"stop": ("ok", "")},
    {"max_tokens": -1},
    {"logprobs": -1},
    {"logprobs": 65},
    {"prompt_logprobs": 65},
]

AT_THE_EDGE = [
    {"n": 128},
    {"temperature": 0.0},
    {"top_p": 1.0},
    {"top_k": -1},
    {"min_p": 1.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"logit_bias": {5: -100.0}},
    {"max_tokens": 0},
    {"logprobs": 0},
    {"prompt_logprobs": 64},
]


@pytest.mark.parametrize("fields", OUT_OF_RANGE, ids=str)
def test_an_invalid_value_is_refused_with_its_field_name(fields: dict[str, object]) -> None:
    (name,) = fields
    with pytest.raises(InvalidRequest, match=name) as refused:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert refused.value.param == name


@pytest.mark.parametrize("fields", AT_THE_EDGE, ids=str)
def test_the_limits_are_inclusive(fields: dict[str, object]) -> None:
    (name,) = fields
    assert getattr(SamplingParams(**fields), name) == fields[name]  # type: ignore[arg-type]


def test_a_single_stop_string_becomes_a_tuple() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


def test_greedy_means_temperature_zero_only() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_each_penalty_switches_the_penalty_path_on(name: str) -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{name: 1.5}).has_penalties  # type: ignore[arg-type]


def test_a_request_crosses_the_wire_and_an_invalid_one_is_refused() -> None:
    request = Request(
        request_id="r1",
        prompt_token_ids=(1, 2),
        params=SamplingParams(logit_bias={7: 1.5}, stop=("x",)),
        selection=(("cidv1:sha256:00", 0.5),),
    )
    wire = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(wire, type=Request) == request
    bad = wire.replace(b"\xa5top_k\x00", b"\xa5top_k\xfe")  # 0 -> -2
    assert bad != wire
    with pytest.raises(InvalidRequest, match="top_k"):
        msgspec.msgpack.decode(bad, type=Request)


def test_the_engine_copy_has_the_seed_and_the_models_end_tokens() -> None:
    def for_engine(seed: int | None) -> Request:
        params = SamplingParams(seed=seed)
        request = Request(request_id="r", prompt_token_ids=(1,), params=params)
        return request.for_engine([2, 7])

    assert for_engine(5).seed == 5 and for_engine(5).eos_token_ids == (2, 7)
    assert for_engine(-1).seed == 2**63 - 1
    drawn = {for_engine(None).seed for _ in range(4)}
    assert len(drawn) == 4 and all(0 <= seed < 2**63 for seed in drawn)


def test_lora_requests_are_equal_and_hashed_by_name() -> None:
    one, same = LoRARequest("sql", 1, "/a"), LoRARequest("sql", 2, "/b")
    assert one == same
    assert hash(one) == hash(same)
    assert one != LoRARequest("poet", 1, "/a")
    assert one != "sql"


def test_a_lora_request_is_encoded_as_an_array() -> None:
    wire = msgspec.json.encode(LoRARequest("sql", 1, "/a"))
    assert wire == b'["sql",1,"/a"]'
    assert msgspec.json.decode(wire, type=LoRARequest).lora_path == "/a"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (("", 1, "/a"), "lora_name"),
        (("sql", 0, "/a"), "lora_int_id"),
        (("sql", -3, "/a"), "lora_int_id"),
        (("sql", 1, ""), "lora_path"),
    ],
)
def test_a_lora_request_names_its_invalid_field(fields: tuple[str, int, str], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as refused:
        LoRARequest(*fields)
    assert refused.value.param == param


def test_a_plan_counts_the_tokens_of_all_its_chunks() -> None:
    def chunk(*token_ids: int) -> Chunk:
        return make_chunk(
            sequence_id=0, token_ids=token_ids, start=0, page_ids=(0,), selection=(), sample=None
        )

    assert StepPlan((chunk(1, 2, 3), chunk(4))).num_tokens == 4
    assert StepPlan(()).num_tokens == 0
