"""LoRA within a step: which tokens use which adapter, augmented weights, merging.

In: the adapters of a batch. Out: deltas of linear layers. Must not import: scheduler, engine.
"""
