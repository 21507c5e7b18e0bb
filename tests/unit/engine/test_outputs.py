from __future__ import annotations

from typing import Any

import pytest

from loramux.backend.text import Delta
from loramux.engine.outputs import OutputCollector
from loramux.engine.tokenizer import Tokenizer
from loramux.types.request import FinishReason, Request, TokenEvent, TokenLogprob
from loramux.types.sampling import SamplingParams
from tests.tokenizer_factory import save_byte_level

EOS = 2
STOP_TOKEN = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_byte_level(tmp_path_factory.mktemp("byte_level")))


def make_collector(tokenizer: Tokenizer, **params: Any) -> OutputCollector:
    request = Request(
        request_id="r",
        prompt_token_ids=(5, 6, 7),
        params=SamplingParams(**params),
        eos_token_ids=(EOS,),
    )
    return OutputCollector(request, tokenizer, prompt="abc")


def event(token_id: int | None, finish: FinishReason | None = None, **fields: Any) -> TokenEvent:
    if finish is FinishReason.STOP:
        fields.setdefault("stop_token_id", token_id)
    return TokenEvent(
        request_id="r",
        index=fields.pop("index", 0),
        token_id=token_id,
        finish_reason=finish,
        **fields,
    )


def apply_all(
    collector: OutputCollector, tokenizer: Tokenizer, text: str, last: TokenEvent | None = None
) -> list[Delta]:
    events = [event(token_id) for token_id in tokenizer.encode(text)]
    deltas = [collector.apply(each) for each in [*events, *([last] if last else [])]]
    return [delta for delta in deltas if delta is not None]


def test_deltas_add_up_to_the_output(tokenizer: Tokenizer) -> None:
    """Catches a stream and a whole answer that differ, and tokens lost while text is held back."""
    collector = make_collector(tokenizer)
    token_ids = tokenizer.encode("Grüße 🚀 né")
    last = event(token_ids[-1], FinishReason.LENGTH)
    deltas = [collector.apply(each) for each in [*map(event, token_ids[:-1]), last]]
    sent = [delta for delta in deltas if delta is not None]
    assert len(sent) < len(deltas)
    output = collector.output.outputs[0]
    assert output.text == "".join(delta.text for delta in sent) == tokenizer.decode(token_ids)
    assert output.token_ids == [i for delta in sent for i in delta.token_ids] == token_ids
    assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)
    assert collector.is_finished
    assert (collector.output.prompt, collector.output.prompt_token_ids) == ("abc", [5, 6, 7])


@pytest.mark.parametrize(
    ("token_id", "params", "text", "reason"),
    [
        (EOS, {}, "fox", None),
        (EOS, {"skip_special_tokens": False}, "fox", None),
        (STOP_TOKEN, {"stop_token_ids": (STOP_TOKEN,)}, "fox", STOP_TOKEN),
        (EOS, {"stop_token_ids": (EOS,), "ignore_eos": True}, "fox", EOS),
        (EOS, {"stop_token_ids": (EOS,)}, "fox", None),
        (
            EOS,
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            "fox<|im_end|>",
            None,
        ),
    ],
)
def test_a_stop_token_is_counted_but_not_decoded(
    tokenizer: Tokenizer, token_id: int, params: dict[str, Any], text: str, reason: int | None
) -> None:
    """Catches an end mark in the text, and an eos that is reported as the caller's stop token."""
    collector = make_collector(tokenizer, **params)
    deltas = apply_all(collector, tokenizer, "fox", event(token_id, FinishReason.STOP))
    output = collector.output.outputs[0]
    assert (output.text, output.stop_reason) == (text, reason)
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids[-1] == token_id
    assert (deltas[-1].stop_reason, deltas[-1].stop_hit) == (reason, False)


def test_a_stop_string_ends_the_choice_and_is_reported_to_the_scheduler(
    tokenizer: Tokenizer,
) -> None:
    """Catches a choice that runs on in the scheduler, or text that comes after the stop."""
    collector = make_collector(tokenizer, stop=("lazy d",), logprobs=0)
    deltas = apply_all(
        collector, tokenizer, "The lazy dog. The end", event(None, FinishReason.ABORT)
    )
    assert [delta.stop_hit for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].finish_reason is FinishReason.STOP
    output = collector.output.outputs[0]
    assert (output.text, output.stop_reason) == ("The ", "lazy d")
    assert output.finish_reason is FinishReason.STOP
    assert tokenizer.decode(output.token_ids) in ("The lazy d", "The lazy do", "The lazy dog")


def test_a_stop_string_in_the_last_allowed_token_is_a_stop(tokenizer: Tokenizer) -> None:
    """Catches `length` for an answer that is complete, and a second end for the scheduler."""
    collector = make_collector(tokenizer, stop=("x",))
    token_ids = tokenizer.encode("fox")
    for token_id in token_ids[:-1]:
        collector.apply(event(token_id))
    delta = collector.apply(event(token_ids[-1], FinishReason.LENGTH))
    assert delta is not None
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "x")
    assert not delta.stop_hit
    assert collector.output.outputs[0].text == "fo"


def test_a_partial_stop_string_is_sent_at_the_end(tokenizer: Tokenizer) -> None:
    """Catches the end of an answer that is held back forever."""
    collector = make_collector(tokenizer, stop=("fox!",))
    deltas = apply_all(collector, tokenizer, "a fox", event(EOS, FinishReason.STOP))
    assert collector.output.outputs[0].text == "a fox"
    assert deltas[-1].text == "fox"


def test_choices_are_independent(tokenizer: Tokenizer) -> None:
    """Catches text or an end that appears in another choice."""
    collector = make_collector(tokenizer, n=2)
    (first,) = tokenizer.encode(" fox")
    collector.apply(event(first, index=1))
    collector.apply(event(EOS, FinishReason.STOP, index=1))
    assert not collector.is_finished
    collector.apply(event(first, FinishReason.LENGTH, index=0))
    assert collector.is_finished
    reasons = [output.finish_reason for output in collector.output.outputs]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP]
    assert [output.index for output in collector.output.outputs] == [0, 1]


def test_logprobs_come_with_their_tokens(tokenizer: Tokenizer) -> None:
    """Catches logprobs that shift against the tokens while text is held back."""
    collector = make_collector(tokenizer, logprobs=0)
    token_ids = tokenizer.encode("🚀 fox")
    deltas = [
        collector.apply(event(token_id, logprob=TokenLogprob(token_id, -0.5, 1)))
        for token_id in token_ids
    ]
    for delta in filter(None, deltas):
        assert delta.logprobs is not None
        assert tuple(logprob.token_id for logprob in delta.logprobs) == delta.token_ids
    assert collector.output.outputs[0].logprobs is not None
    assert len(collector.output.outputs[0].logprobs) == len(token_ids)
    assert make_collector(tokenizer).output.outputs[0].logprobs is None


def test_prompt_logprobs_are_collected_once(tokenizer: Tokenizer) -> None:
    """Catches a prompt that is described once for each of the choices."""
    collector = make_collector(tokenizer, n=2, prompt_logprobs=0)
    described = [TokenLogprob(6, -1.0, 1), TokenLogprob(7, -2.0, 3)]
    for index in range(2):
        collector.apply(event(50, index=index, prompt_logprobs=described))
    collector.apply(event(None, FinishReason.ABORT, prompt_logprobs=described))
    assert collector.output.prompt_logprobs == described
    assert make_collector(tokenizer).output.prompt_logprobs is None


def test_prompt_logprobs_come_with_the_first_delta_of_a_choice(tokenizer: Tokenizer) -> None:
    """Catches an echo whose logprobs are lost because the first token's text was held back."""
    collector = make_collector(tokenizer, prompt_logprobs=0)
    described = [TokenLogprob(6, -1.0, 1), TokenLogprob(7, -2.0, 3)]
    head = tokenizer.encode("🚀")[0]
    assert collector.apply(event(head, prompt_logprobs=described)) is None
    deltas = [collector.apply(event(token_id)) for token_id in tokenizer.encode(" fox fox")]
    assert [d.prompt_logprobs for d in deltas if d is not None] == [tuple(described), None]


def test_reused_tokens_come_with_the_first_delta_of_a_choice(tokenizer: Tokenizer) -> None:
    """Catches a count that is lost while text is held back, or reported twice."""
    collector = make_collector(tokenizer)
    head = tokenizer.encode("🚀")[0]
    assert collector.apply(event(head, num_reused=2)) is None
    deltas = [collector.apply(event(token_id)) for token_id in tokenizer.encode(" fox fox")]
    assert [d.num_reused for d in deltas if d is not None] == [2, None]


def test_an_error_reaches_the_stream(tokenizer: Tokenizer) -> None:
    """Catches a stream that ends early and looks complete."""
    collector = make_collector(tokenizer)
    end = event(None, FinishReason.ERROR, error="The adapter is gone.", error_code="adapter")
    delta = collector.apply(end)
    assert delta is not None
    assert (delta.finish_reason, delta.error) == (FinishReason.ERROR, "The adapter is gone.")
    assert delta.error_code == "adapter"
    assert collector.is_finished


def test_events_after_the_end_are_ignored(tokenizer: Tokenizer) -> None:
    """Catches tokens that were on their way when a choice ended."""
    collector = make_collector(tokenizer)
    assert collector.apply(event(None, FinishReason.LENGTH)) is not None
    assert collector.apply(event(50)) is None
    assert collector.output.outputs[0].token_ids == []


def test_the_last_token_of_a_grammar_is_part_of_the_text(tokenizer: Tokenizer) -> None:
    collector = make_collector(tokenizer)
    *first, last = tokenizer.encode("ab}")
    for token_id in first:
        collector.apply(event(token_id))
    delta = collector.apply(event(last, FinishReason.STOP, stop_token_id=None))
    assert collector.output.outputs[0].text == "ab}"
    assert delta is not None and delta.finish_reason is FinishReason.STOP
    assert delta.stop_reason is None


def test_stop_strings_count_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("q")[0]
    collector = make_collector(tokenizer, stop=("q",), min_tokens=2)
    deltas = [collector.apply(event(token)) for _ in range(3)]
    assert [delta and delta.stop_reason for delta in deltas] == [None, None, "q"]
    assert collector.output.outputs[0].text == "qq"
