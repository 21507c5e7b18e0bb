"""The choice of the sequences of the next step: queue, fairness, chunks.

In: requests and results. Out: StepPlan and token events.
Must not import: torch, runner, a clock.
"""
