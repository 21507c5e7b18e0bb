"""Bodies, streams, endpoints and the OpenAPI document.

In: ASGI requests. Out: decoded bodies and answers. Must not import: a room above it.
"""
