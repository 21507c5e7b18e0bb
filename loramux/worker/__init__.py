"""Processes of engines: start, supervision, messages, pulse, step loop.

In: an engine to run. Out: a supervised process. Must not import: torch, server.
"""
