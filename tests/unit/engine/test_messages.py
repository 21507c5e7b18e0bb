from __future__ import annotations

import errno

import msgspec
import pytest

from loramux.backend.host import AdapterUse, EngineStats, TierStats
from loramux.engine.messages import Add, Command, Events, ListPages, Reply
from loramux.errors import (
    AdapterRefused,
    DoesNotFit,
    EngineBusy,
    FilesUnavailable,
    InvalidRequest,
    LoramuxError,
)
from loramux.types.request import FinishReason, Request, TokenEvent, TokenLogprob
from loramux.types.sampling import SamplingParams
from loramux.worker.messages import (
    Answer,
    ListUses,
    Pin,
    Prewarm,
    Refused,
    ResidencyUpdate,
    decode_error,
    encode_error,
)

STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    num_pages=3,
    num_free_pages=4,
    num_idle_pages=2,
    num_preemptions=5,
    num_adapter_loads=6,
    num_adapter_evictions=7,
    num_steps=8,
    running_adapters={"a": 1},
    waiting_adapters={},
    tiers=(TierStats(tier="device", hits=3), TierStats(tier="host", load_seconds=0.5)),
    prefix_query_tokens=9,
    prefix_hit_tokens=8,
    step_loss_s={"0.001": 2, "+Inf": 0},
    step_loss_sum_s=0.25,
)


def test_a_request_crosses_the_channel_with_all_its_fields() -> None:
    request = Request(
        request_id="x",
        prompt_token_ids=(1, 2),
        params=SamplingParams(stop=("a",), logit_bias={5: 1.5}, logprobs=3, seed=2**62),
        selection=(("cid", 0.5),),
        eos_token_ids=(2,),
        seed=2**63 - 1,
    )
    sent = msgspec.msgpack.encode(Add(request=request))
    assert msgspec.msgpack.decode(sent, type=Command) == Add(request=request)


@pytest.mark.parametrize(
    "reply",
    [
        Events(
            events=[
                TokenEvent(
                    request_id="x",
                    index=1,
                    token_id=None,
                    finish_reason=FinishReason.LENGTH,
                    logprob=TokenLogprob(4, float("-inf"), 1, ((4, -0.5),)),
                )
            ],
            stats=STATS,
            residency=ResidencyUpdate((("a", 5), ("b", 0)), False),
        ),
        Refused(request_id="x", error=encode_error(DoesNotFit("too large"))),
        Answer(call_id=3),
        Answer(call_id=4, uses=[AdapterUse(cid="a", tier="disk", num_bytes=1, rank=2)]),
    ],
)
def test_replies_cross_unchanged(reply: Reply) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=Reply) == reply


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("bad", param="top_p"),
        DoesNotFit("too large"),
        AdapterRefused("wrong_shape", "It is wrong.", fix="Train it again."),
        EngineBusy("full"),
        LoramuxError("something"),
    ],
)
def test_errors_are_rebuilt_with_all_their_attributes(error: LoramuxError) -> None:
    made = decode_error(encode_error(error))
    assert type(made) is type(error) and str(made) == str(error)
    assert vars(made) == vars(error)


@pytest.mark.parametrize(
    "command",
    [
        Pin(call_id=1, cid="a", is_pinned=True),
        Prewarm(cids=("a", "b"), num_busiest=3),
        ListUses(call_id=2),
        ListPages(call_id=3),
    ],
)
def test_adapter_commands_cross_unchanged(command: Command) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command


def test_the_text_of_an_unexpected_error_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    made = decode_error(encode_error(ZeroDivisionError("division by zero")))
    assert type(made) is LoramuxError and "division" not in str(made)
    assert "division by zero" in caplog.text


def test_a_machine_without_descriptors_is_no_fault_of_an_adapter() -> None:
    made = decode_error(encode_error(OSError(errno.EMFILE, "x", "/srv/secret")))
    assert type(made) is FilesUnavailable and "/srv" not in str(made)
    assert "Too many open files" in str(made)
