"""Series per adapter: the busiest by name, the rest as one, and none that ever goes down."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.metrics.server import Metrics
from loramux.metrics.traffic import HALF_LIFE_S, AdapterTraffic
from tests.unit.metrics.scraping import scraped
from tests.unit.server.asgi_client import complete, get, make_app
from tests.unit.server.scripted_backend import ScriptedBackend, named

NAMES = [f"a{number}" for number in range(9)] + ["other"]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tokens(traffic: AdapterTraffic, known: list[str] = NAMES) -> dict[str, int]:
    return {name: one.num_generation_tokens for name, one in traffic.series(known)}


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 50), st.booleans())))
def test_counters_never_go_down_and_nothing_is_counted_twice_or_lost(
    steps: list[tuple[str, int, bool]],
) -> None:
    """Catches a rest that shrinks when an adapter becomes busy: Prometheus would see a restart."""
    traffic = AdapterTraffic(num_shown=3, clock=Clock())
    before: dict[str, int] = {}
    grown = 0
    for name, num_tokens, is_scraped in steps:
        traffic.counted(name).add(generation_tokens=num_tokens)
        if is_scraped:
            now = tokens(traffic)
            assert len(now) <= 4 and "other" in now
            gains = [now[name] - before.get(name, 0) for name in now]
            assert min(gains) >= 0
            grown += sum(gains)
            before |= now
    for name in NAMES:
        assert traffic.total(name).num_tokens == sum(n for who, n, _ in steps if who == name)
    scraped_last = bool(steps) and steps[-1][2]
    if scraped_last and len({who for who, _, _ in steps}) <= 3:
        assert grown == sum(n for _, n, _ in steps)


def test_an_adapter_that_becomes_busy_takes_the_place_of_an_idle_one() -> None:
    clock = Clock()
    traffic = AdapterTraffic(num_shown=2, clock=clock)
    for name in ("a0", "a1"):
        traffic.counted(name).add(generation_tokens=1000)
    assert tokens(traffic) == {"a0": 1000, "a1": 1000, "other": 0}
    clock.now_s = 10 * HALF_LIFE_S
    traffic.counted("a2").add(generation_tokens=50)
    traffic.counted("a1").add(generation_tokens=10)
    assert tokens(traffic) == {"a2": 0, "a1": 1010, "other": 50}
    traffic.counted("a2").add(generation_tokens=7)
    assert tokens(traffic)["a2"] == 7
    assert traffic.busiest() == ["a2", "a1", "a0"]


def test_an_adapter_called_other_cannot_double_a_series() -> None:
    traffic = AdapterTraffic(num_shown=5)
    traffic.counted("other").add(generation_tokens=3)
    assert list(traffic.series(NAMES)) == [("other", traffic.counted("other").shown_in)]
    assert tokens(traffic) == {"other": 3}


def test_removed_adapters_leave_the_scrape() -> None:
    traffic = AdapterTraffic(num_shown=5)
    running = traffic.counted("a0")
    assert "a0" not in tokens(traffic, ["a1"])
    running.add(generation_tokens=1)
    assert tokens(traffic, ["a1"]) == {"other": 0}


def test_requests_of_a_server_are_counted_by_adapter_and_the_base_is_not_one() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    for model in ("legal", "legal", "tiny-base"):
        assert complete(app, model=model).status_code == 200
    text = get(app, "/metrics").text
    label = '{adapter="legal",model_name="tiny-base"}'
    assert f"loramux:adapter_requests_total{label} 2.0" in text
    assert f"loramux:adapter_prompt_tokens_total{label} 4.0" in text
    assert f"loramux:adapter_generation_tokens_total{label} 18.0" in text
    assert 'adapter="tiny-base"' not in text


def test_a_thousand_adapters_are_twenty_series_and_a_rest() -> None:
    backend = ScriptedBackend()
    names = [f"n{number}" for number in range(1000)]
    for name in names:
        backend.give_name(name, named(name))
    metrics = Metrics(backend, labels_of=backend.names.labels_of)
    for number, name in enumerate(names):
        for counted in metrics.counted(named(name).cid, name):
            counted.add(requests=1, generation_tokens=number)
    scraped(backend, metrics)
    found = scraped(backend, metrics)["loramux:adapter_requests_total"]
    shown = [labels["adapter"] for labels, _ in found]
    assert shown == [f"n{number}" for number in range(999, 979, -1)] + ["other"]
