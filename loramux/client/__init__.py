"""The Python client, sync and async, with retries and streams.

In: requests of a program. Out: typed replies and errors. Must not import: torch, server.
"""
