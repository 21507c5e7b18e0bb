"""Prometheus metrics of engines, images, servers and stores.

In: statistics as dataclasses. Out: exposition text. Must not import: torch.
"""
