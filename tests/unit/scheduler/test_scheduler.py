from __future__ import annotations

import pytest

from loramux.errors import AdapterNotFound, DoesNotFit, InvalidRequest
from loramux.types.request import FinishReason, Request, TokenEvent
from loramux.types.step import SampleRow, StepResult
from tests.unit.scheduler.scheduler_factory import UNKNOWN, Always, World, make_request


def test_decodes_come_before_prompts_and_prompts_fill_the_rest() -> None:
    world = World()
    world.add("a", 3)
    world.step()
    world.add("b", 30)
    plan = world.begin()
    assert plan is not None
    assert [(c.start, len(c.token_ids)) for c in plan.chunks] == [(3, 1), (0, 15)]
    assert not plan.chunks[1].num_sampled


def test_a_long_prefill_does_not_delay_decodes() -> None:
    world = World()
    world.add("a", 3, tenant="a", tenant_share=0.01, max_tokens=20)
    world.step()
    world.add("b", 60, tenant="b", max_tokens=1)
    for _ in range(4):
        plan = world.begin()
        assert plan is not None and world.running() == ["a", "b"]
        world.end()


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once() -> None:
    world = World()
    world.add("a", 40, max_tokens=1)
    chunks = []
    while (plan := world.begin()) is not None:
        chunks += [(c.start, list(c.token_ids), bool(c.num_sampled)) for c in plan.chunks]
        world.end()
    assert [start for start, _, _ in chunks] == [0, 16, 32]
    assert [token for _, tokens, _ in chunks for token in tokens] == list(range(1, 41))
    assert [sampled for _, _, sampled in chunks] == [False, False, True]


@pytest.mark.parametrize(
    ("token", "params", "reason", "length"),
    [
        (99, {}, FinishReason.STOP, 1),
        (99, {"ignore_eos": True}, FinishReason.LENGTH, 4),
        (7, {"stop_token_ids": (7,)}, FinishReason.STOP, 1),
        (7, {}, FinishReason.LENGTH, 4),
        (7, {"max_tokens": 1000}, FinishReason.LENGTH, 61),
    ],
)
def test_ends_for_the_right_reason(
    token: int, params: dict[str, object], reason: FinishReason, length: int
) -> None:
    world = World()
    world.add("a", 3, **params)
    events: list[TokenEvent] = []
    while world.scheduler.has_work:
        events += world.step(token)
    assert [e.finish_reason for e in events] == [None] * (length - 1) + [reason]


@pytest.mark.parametrize(
    ("tokens", "told", "reason"),
    [([7, 8], [7, 8], None), ([7, 99, 8], [7, 99], "stop"), ([7] * 4, [7] * 4, "length")],
)
def test_a_step_may_give_several_tokens_of_a_sequence(
    tokens: list[int], told: list[int], reason: str | None
) -> None:
    world = World(drafts=Always([8] * 4))
    world.add("a", 3, max_tokens=5)
    first, *_ = world.step(6)
    assert first.token_id == 6
    plan = world.begin()
    assert plan is not None and plan.chunks[0].token_ids == [6, 8, 8, 8]
    world.scheduler.launched(plan)
    events = world.scheduler.apply(plan, StepResult({plan.chunks[0].sequence_id: tokens}))
    assert [event.token_id for event in events] == told
    assert [event.finish_reason for event in events] == [None] * (len(told) - 1) + [reason]
    following = world.begin()
    if reason is None:
        assert following is not None
        assert (following.chunks[0].start, following.chunks[0].token_ids) == (5, [8, 8])
    else:
        assert following is None


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing() -> None:
    world = World()
    world.add("a", 20, max_tokens=0)
    assert [(e.token_id, e.finish_reason) for e in world.run()] == [(None, FinishReason.LENGTH)]


@pytest.mark.parametrize("schedule", ["fair", "fcfs"])
@pytest.mark.parametrize("has_prefixes", [True, False])
def test_r13_when_pages_run_out_the_newest_waits_and_all_finish(
    schedule: str, has_prefixes: bool
) -> None:
    world = World(num_pages=6, schedule=schedule, has_prefixes=has_prefixes)
    for number, name in enumerate("abcd"):
        world.add(name, list(range(10 * number, 10 * number + 6)), max_tokens=9)
    events = world.run()
    assert world.scheduler.num_preemptions > 0
    counts = {name: sum(e.request_id == name for e in events) for name in "abcd"}
    assert counts == dict.fromkeys("abcd", 9)
    finished = [e.request_id for e in events if e.finish_reason is not None]
    assert finished[0] == "a"


def test_r13_a_preempted_sequence_is_computed_again_with_its_output() -> None:
    world = World(num_pages=4, has_prefixes=False)
    world.add("a", 6, max_tokens=9)
    world.add("b", 6, max_tokens=9)
    seen: dict[int, list[list[int]]] = {}
    while (plan := world.begin()) is not None:
        for chunk in plan.chunks:
            seen.setdefault(chunk.sequence_id, []).append(list(chunk.token_ids))
        world.end()
    again = [tokens for tokens in seen[1][1:] if len(tokens) > 1]
    assert again and again[0][:6] == [1, 2, 3, 4, 5, 6] and set(again[0][6:]) <= {7}


def test_abort_frees_everything_before_the_next_step() -> None:
    world = World()
    world.add("a", 6, cid="x", n=2)
    world.add("b", 6)
    world.step()
    world.scheduler.abort("a")
    world.check()
    assert world.scheduler.leases() == {}
    assert {e.request_id for e in world.run()} == {"b"}
    world.scheduler.abort("never heard of")


def test_an_abort_in_the_queue_removes_the_waiters() -> None:
    world = World(load_s=5.0)
    world.add("a", 6, cid="x", n=3)
    assert world.scheduler.waiting_adapters() == {"x": 3}
    assert list(world.scheduler.waiting_tenants().values()) == [3]
    world.scheduler.abort("a")
    world.check()
    assert world.scheduler.waiting_adapters() == {}
    assert not world.scheduler.has_work


def test_an_abort_during_a_step_discards_its_result() -> None:
    world = World()
    world.add("a", 6)
    world.begin()
    world.scheduler.abort("a")
    assert world.end() == []
    assert not world.scheduler.has_work


def test_a_stop_string_ends_one_choice_and_the_other_goes_on() -> None:
    world = World()
    world.add("a", 3, n=2)
    world.step()
    world.scheduler.finish("a", 0)
    assert {e.index for e in world.run()} == {1}


def test_choices_have_seeds_of_their_own() -> None:
    world = World()
    world.add("a", 3, n=3)
    plan = world.begin()
    assert plan is not None
    uses = [chunk.rows[-1].use for chunk in plan.chunks]
    assert len({use.seed for use in uses if isinstance(use, SampleRow)}) == 3


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (make_request("a", 0), InvalidRequest, "empty"),
        (make_request("a", 64), InvalidRequest, "64 tokens"),
        (make_request("a", 36, max_tokens=1), DoesNotFit, "10 pages for 37 tokens and 0"),
        (make_request("a", 30, max_tokens=1, cid="x"), DoesNotFit, "8 pages for 31 tokens and 2"),
        (make_request("a", cid=UNKNOWN), AdapterNotFound, "No adapter"),
        (make_request("a", tenant_share=0.0), InvalidRequest, "tenant_share must be over 0"),
        (make_request("a", adapter_share=-1.0), InvalidRequest, "adapter_share must be over 0"),
        (make_request("a", timeout_s=float("nan")), InvalidRequest, "timeout_s must be over 0"),
        (
            make_request("a", selection=(("x", 1.0), ("y", 1.0), ("z", 1.0))),
            InvalidRequest,
            "names 3 adapters, and this server runs 2",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(
    request_: Request, error: type[Exception], says: str
) -> None:
    world = World(num_pages=9, max_loras=2)
    with pytest.raises(error, match=says):
        world.scheduler.add(request_, 0.0)
    assert not world.scheduler.has_work
    world.check()


def test_an_add_that_fails_halfway_leaves_no_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is removed between the check and the last choice of the request."""
    world = World()
    add_waiters, calls = world.adapters.add_waiters, []

    def fail_third(cids: list[str]) -> None:
        calls.append(cids)
        if len(calls) == 3:
            raise AdapterNotFound("gone")
        add_waiters(cids)

    monkeypatch.setattr(world.adapters, "add_waiters", fail_third)
    with pytest.raises(AdapterNotFound):
        world.add("a", 3, cid="x", n=3)
    assert not world.scheduler.has_work
    world.check()


def test_r13_an_output_ends_where_the_pool_does() -> None:
    """An adapter's pages leave fewer for tokens, which ends the output without an error."""
    lengths = {}
    for cid in (None, "x"):
        world = World(num_pages=9)
        world.add("a", 20, max_tokens=50, cid=cid)
        events = world.run()
        assert events[-1].finish_reason is FinishReason.LENGTH
        lengths[cid] = 20 + len(events)
    assert lengths == {None: 9 * 4, "x": 7 * 4}


def test_an_id_in_use_is_refused() -> None:
    world = World()
    world.add("a", 3)
    with pytest.raises(InvalidRequest, match="in use"):
        world.add("a", 3)


@pytest.mark.parametrize("limit", ["max_sequences", "max_batch_tokens"])
def test_no_more_sequences_run_than_allowed(limit: str) -> None:
    """Each running sequence has a token in every step, so that the budget is a limit, too."""
    world = World(**{limit: 2})
    for name in "abcde":
        world.add(name, 2)
    while world.scheduler.has_work:
        world.step()
        assert world.scheduler.num_running <= 2


def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    world = World(max_sequences=1)
    world.add("a", 3, max_tokens=50, timeout_s=0.55)
    world.add("b", 3, max_tokens=9, timeout_s=0.35, n=2)
    world.add("c", 3)
    events = world.run()
    errors = {(e.request_id, e.index): e for e in events if e.error is not None}
    assert errors.keys() == {("a", 0), ("b", 0), ("b", 1)}
    assert all(e.finish_reason is FinishReason.ERROR for e in errors.values())
    assert {e.error_code for e in errors.values()} == {"timeout"}
    says = errors["a", 0].error
    assert says is not None and "after 0.55 s: 6 of 50 tokens were made" in says
    says = errors["b", 1].error
    assert says is not None and "0 of 9 tokens" in says and "waiting" in says
    assert sum(e.request_id == "c" for e in events) == 4


def test_a_deadline_that_is_met_says_nothing() -> None:
    world = World()
    world.add("a", 3, timeout_s=0.5)
    world.run()
    world.now = 10.0
    assert world.step() == []
