"""Structs of the JSON bodies of the server's own API.

In: JSON. Out: checked structs. Must not import: torch, server.
"""
