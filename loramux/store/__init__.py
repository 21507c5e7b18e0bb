"""Adapters by content: files by digest, shared cache, bucket, garbage collection.

In: fetched files. Out: folders by CID. Must not import: torch, server.
"""
