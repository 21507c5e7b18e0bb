from __future__ import annotations

from collections.abc import Iterable

import pytest

from loramux.config import SchedulerConfig
from loramux.errors import AdapterRefused, DoesNotFit, InvalidRequest
from loramux.memory.pages import PageAllocator
from loramux.scheduler.scheduler import Scheduler
from loramux.types import FinishReason, Request, SamplingParams, StepPlan, StepResult, TokenEvent


class PageGate:
    """Adapters that cost pages and are always there; a name in `broken` cannot be loaded."""

    def __init__(self, pages: PageAllocator, broken: frozenset[str] = frozenset()) -> None:
        self._pages = pages
        self._broken = broken
        self.leases: dict[str, int] = {}

    def num_pages(self, cid: str) -> int:
        return 2

    def acquire(self, cids: Iterable[str]) -> bool:
        for cid in cids:
            if cid in self._broken:
                raise AdapterRefused("changed_on_disk", f"{cid} is broken.")
            self.leases[cid] = self.leases.get(cid, 0) + 1
        return True

    def release(self, cids: Iterable[str]) -> None:
        for cid in cids:
            self.leases[cid] -= 1

    def make_room(self, num_pages: int) -> bool:
        return self._pages.num_free >= num_pages

    @property
    def num_available(self) -> int:
        return self._pages.num_free


def make_scheduler(
    num_pages: int = 16, broken: frozenset[str] = frozenset(), **overrides: int
) -> Scheduler:
    pages = PageAllocator(num_pages)
    settings = {"max_batch_tokens": 16, "max_sequences": 8, "block_tokens": 4, "max_model_len": 64}
    config = SchedulerConfig(**{**settings, **overrides})
    return Scheduler(config, pages=pages, adapters=PageGate(pages, broken))


def make_request(name: str, num_prompt: int, **params: object) -> Request:
    cid = params.pop("cid", None)
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(1, num_prompt + 1)),
        params=SamplingParams(**{"max_tokens": 4, **params}),  # type: ignore[arg-type]
        selection=((str(cid), 1.0),) if cid else (),
        eos_token_ids=(99,),
    )


def answer(plan: StepPlan, token: int = 7) -> StepResult:
    return StepResult({c.sequence_id: token for c in plan.chunks if c.sample is not None})


def run_to_end(scheduler: Scheduler, limit: int = 200) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for _ in range(limit):
        plan = scheduler.next_plan()
        scheduler.check_integrity()
        if plan is None:
            return events + scheduler.take_events()
        events += scheduler.apply(plan, answer(plan))
        scheduler.check_integrity()
    raise AssertionError("the queue does not drain")


def test_decodes_come_before_prompts_and_prompts_fill_the_rest() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    plan = scheduler.next_plan()
    assert plan is not None
    scheduler.apply(plan, answer(plan))
    scheduler.add(make_request("b", 30))
    plan = scheduler.next_plan()
    assert plan is not None
    assert [(c.start, len(c.token_ids)) for c in plan.chunks] == [(3, 1), (0, 15)]
    assert plan.chunks[1].sample is None


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 40, max_tokens=1))
    chunks = []
    while (plan := scheduler.next_plan()) is not None:
        chunks += [(c.start, list(c.token_ids), c.sample is not None) for c in plan.chunks]
        scheduler.apply(plan, answer(plan))
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
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, **params))
    events: list[TokenEvent] = []
    while (plan := scheduler.next_plan()) is not None:
        events += scheduler.apply(plan, answer(plan, token))
    assert [e.finish_reason for e in events] == [None] * (length - 1) + [reason]
    assert not scheduler.has_work


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 20, max_tokens=0))
    events = run_to_end(scheduler)
    assert [(e.token_id, e.finish_reason) for e in events] == [(None, FinishReason.LENGTH)]


def test_when_pages_run_out_the_newest_waits_and_everybody_finishes() -> None:
    scheduler = make_scheduler(num_pages=6)
    for name in "abcd":
        scheduler.add(make_request(name, 6, max_tokens=9))
    events = run_to_end(scheduler)
    assert scheduler.num_preemptions > 0
    counts = {name: sum(e.request_id == name for e in events) for name in "abcd"}
    assert counts == dict.fromkeys("abcd", 9)
    finished = [e.request_id for e in events if e.finish_reason is not None]
    assert finished[0] == "a"


def test_a_preempted_sequence_is_computed_again_with_what_it_had_generated() -> None:
    scheduler = make_scheduler(num_pages=4)
    scheduler.add(make_request("a", 6, max_tokens=9))
    scheduler.add(make_request("b", 6, max_tokens=9))
    seen: dict[int, list[list[int]]] = {}
    while (plan := scheduler.next_plan()) is not None:
        for chunk in plan.chunks:
            seen.setdefault(chunk.sequence_id, []).append(list(chunk.token_ids))
        scheduler.apply(plan, answer(plan))
    again = [tokens for tokens in seen[1][1:] if len(tokens) > 1]
    assert again and again[0][:6] == [1, 2, 3, 4, 5, 6] and set(again[0][6:]) <= {7}


def test_abort_frees_everything_before_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6, cid="x", n=2))
    scheduler.add(make_request("b", 6))
    plan = scheduler.next_plan()
    assert plan is not None
    scheduler.apply(plan, answer(plan))
    scheduler.abort("a")
    scheduler.check_integrity()
    assert scheduler.leases() == {}
    assert {e.request_id for e in run_to_end(scheduler)} == {"b"}
    scheduler.abort("never heard of")


def test_an_abort_during_a_step_discards_its_result() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6))
    plan = scheduler.next_plan()
    assert plan is not None
    scheduler.abort("a")
    assert scheduler.apply(plan, answer(plan)) == []
    assert not scheduler.has_work


def test_a_stop_string_ends_one_choice_and_the_other_goes_on() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, n=2))
    plan = scheduler.next_plan()
    assert plan is not None
    scheduler.apply(plan, answer(plan))
    scheduler.finish("a", 0)
    events = run_to_end(scheduler)
    assert {e.index for e in events} == {1}


def test_choices_have_seeds_of_their_own() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, n=3))
    plan = scheduler.next_plan()
    assert plan is not None
    assert len({c.sample.seed for c in plan.chunks if c.sample}) == 3


def test_a_broken_adapter_fails_its_own_request_only() -> None:
    scheduler = make_scheduler(broken=frozenset({"bad"}))
    scheduler.add(make_request("a", 3, cid="bad", n=2))
    scheduler.add(make_request("b", 3))
    events = run_to_end(scheduler)
    errors = [e for e in events if e.finish_reason is FinishReason.ERROR]
    assert {e.request_id for e in errors} == {"a"} and len(errors) == 2
    assert errors[0].error is not None and "bad is broken" in errors[0].error
    assert sum(e.request_id == "b" for e in events) == 4


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (make_request("a", 0), InvalidRequest, "empty"),
        (make_request("a", 64), InvalidRequest, "64 tokens"),
        (make_request("a", 36, max_tokens=1), DoesNotFit, "10 pages for 37 tokens and 0"),
        (make_request("a", 30, max_tokens=1, cid="x"), DoesNotFit, "8 pages for 31 tokens and 2"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    request_: Request, error: type[Exception], says: str
) -> None:
    scheduler = make_scheduler(num_pages=9)
    with pytest.raises(error, match=says):
        scheduler.add(request_)
    assert not scheduler.has_work


def test_an_output_ends_where_the_pool_does() -> None:
    """An adapter's pages leave less room for tokens; that ends the output, not the request."""
    lengths = {}
    for cid in (None, "x"):
        scheduler = make_scheduler(num_pages=9)
        scheduler.add(make_request("a", 20, max_tokens=50, cid=cid))
        events = run_to_end(scheduler)
        assert events[-1].finish_reason is FinishReason.LENGTH
        lengths[cid] = 20 + len(events)
    assert lengths == {None: 9 * 4, "x": 7 * 4}


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    with pytest.raises(InvalidRequest, match="in use"):
        scheduler.add(make_request("a", 3))


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = make_scheduler(max_sequences=2, num_pages=64)
    for name in "abcde":
        scheduler.add(make_request(name, 2))
    plan = scheduler.next_plan()
    assert plan is not None and len(plan.chunks) == 2
    run_to_end(scheduler)
