"""Adapters from the hub, buckets, HTTP and folders, fetched within limits.

In: a source as text. Out: files in a temporary or kept folder. Must not import: torch.
"""
