"""A step on a device: plan -> tensors -> forward -> sampled tokens, with CUDA graphs.

In: StepPlan. Out: StepResult. Must not import: scheduler.
"""
