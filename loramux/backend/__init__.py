"""The interfaces between the server and its engines.

In and out: Protocols and cards of text, images and adapters. Must not import: torch, any engine.
"""
