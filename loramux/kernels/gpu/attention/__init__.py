"""Paged attention: decode with split-K, and prefill over chunks."""
