from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from loramux.cli.top import Frame, age_text, frame_view
from loramux.client.replies import AdapterInfo, EngineInfo, TierInfo


def adapter(name: str, **fields: Any) -> AdapterInfo:
    settings: dict[str, Any] = {"rank": 8, "bytes": 2**20, "tier": "host", **fields}
    return AdapterInfo(id=name, cid=f"cid-{name}", **settings)


def frame(taken_s: float = 0.0, *adapters: AdapterInfo, **fields: Any) -> Frame:
    engine = EngineInfo(model="smol", status="ready", **fields)
    return Frame(url="u", engine=engine, adapters=adapters, taken_s=taken_s, clock_s=1000.0)


def shown(frame: Frame, fault: str | None = None) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(frame_view(frame, fault))
    return captured.get()


def after(last: Frame, now: Frame) -> Frame:
    return Frame(
        url=now.url,
        engine=now.engine,
        adapters=now.adapters,
        taken_s=now.taken_s,
        clock_s=now.clock_s,
        last=last,
    )


def row(text: str, word: str) -> list[str]:
    line = next(line for line in text.splitlines() if word in line and "│" in line)
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_rates_are_what_came_between_two_frames() -> None:
    first = frame(10.0, adapter("a", generation_tokens=100), generation_tokens=100, requests=1)
    second = frame(12.0, adapter("a", generation_tokens=300), generation_tokens=350, requests=2)
    text = shown(after(first, second))
    assert "125.0/s out" in text and "0.5/s" in text
    assert "100.0/s" in row(text, "a ")
    assert "–" in shown(first)


def test_the_title_names_the_device() -> None:
    gpu = frame(device="cuda", gpu_name="NVIDIA H200", dtype="bfloat16")
    assert "smol  NVIDIA H200 bfloat16  ready" in shown(gpu)
    assert "smol  cpu float32  ready" in shown(frame(device="cpu", dtype="float32"))


def test_a_restarted_server_has_no_negative_rates() -> None:
    text = shown(after(frame(1.0, generation_tokens=500), frame(2.0, generation_tokens=3)))
    assert "-" not in text.splitlines()[1]


def test_a_row_tells_names_pins_and_last_use() -> None:
    one = adapter("legal", names=("legal", "law"), pinned=True, last_use=990.0, waiting=4, hits=6)
    cells = row(shown(frame(0.0, one)), "legal")
    assert cells == [
        *("legal (+1)", "host pinned", "8", "1 MiB", "0", "4", "0", "–", "6", "0", "10 s"),
    ]
    assert "never" in row(shown(frame(0.0, adapter("new"))), "new")


def test_tiers_share_out_where_adapters_were_found() -> None:
    tiers = (
        TierInfo(tier="device", budget_bytes=2**30, used_bytes=2**29, adapters=12, hits=75),
        TierInfo(tier="disk", hits=25, loads=4, load_seconds=0.1, evictions=3, failures=1),
    )
    text = shown(frame(tiers=tiers))
    assert row(text, "device")[:5] == ["device", "12", "512 MiB", "1 GiB", "75.0%"]
    assert row(text, "disk")[4:] == ["25.0%", "4", "25.0 ms", "3", "1"]


def test_terminal_sequences_from_a_server_are_escaped() -> None:
    bad = "x\x1b[2J"
    text = shown(frame(0.0, adapter(bad, tier=bad), tiers=(TierInfo(tier=bad),)), fault=bad)
    assert "\x1b[2J" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (59, "59 s"), (180, "3 min"), (10_800, "3 h"), (259_200, "3 d")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
