from __future__ import annotations

import torch

from benchmarks.lib import cpu_kernels
from benchmarks.lib.lora_cases import CASES, Case


def test_the_nine_cases_have_the_adapters_that_peers_were_measured_with() -> None:
    found = [(case.num_tokens, case.sites, case.num_adapters) for case in CASES]
    assert found == [
        *((1, "qkvo", 1), (1, "all", 1), (32, "qkvo", 1), (32, "qkvo", 32), (32, "all", 9)),
        *((32, "all", 32), (256, "qkvo", 40), (256, "all", 40), (256, "all", 256)),
    ]


def test_tokens_of_an_adapter_are_adjacent_and_every_adapter_has_one() -> None:
    ids = Case(64, "all", "skewed", 0.0).adapters()
    assert torch.equal(ids, ids.sort().values)
    assert len(ids.unique()) == int(ids.max()) + 1


def test_the_cpu_kernels_are_timed_and_checked() -> None:
    row = cpu_kernels.time_case(Case(8, "all", "skewed", 0.0), num_runs=1)
    assert row["tokens"] == 8 and all(float(str(row[n])) > 0 for n in ("base", "alone"))


def test_segments_cover_all_tokens() -> None:
    segments = cpu_kernels.segments_of([0, 0, 1, 3, 3, 3])
    assert [(s.slot, s.start, s.stop) for s in segments] == [(0, 0, 2), (1, 2, 3), (3, 3, 6)]
