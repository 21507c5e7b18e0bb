"""Tokens of an answer."""

from __future__ import annotations

from dataclasses import replace

from loramux.server.usage import UsageCount
from loramux.types.request import Request
from loramux.types.sampling import SamplingParams
from tests.unit.server.scripted_backend import delta


def test_a_prompt_counts_once_and_reuse_is_the_least_of_its_choices() -> None:
    params = SamplingParams(n=2)
    jobs = [Request(request_id=str(i), prompt_token_ids=(1, 2, 3), params=params) for i in range(2)]
    count = UsageCount(jobs)
    for job_index, job in enumerate(jobs):
        count.add(job_index, replace(delta(job, 0, b"ab"), num_reused=1))
        count.add(job_index, replace(delta(job, 1, b"c"), num_reused=3))
    usage = count.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 6, 12)
    assert usage.prompt_tokens_details.cached_tokens == 2
