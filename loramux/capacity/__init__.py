"""Sizing: how many adapters fit a GPU, and the expected hit rates.

In: shapes, ranks and memory sizes. Out: a plan with advice. Must not import: torch.
"""
