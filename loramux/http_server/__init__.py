"""Connections below any ASGI application: limits, TLS, browsers' requests.

In: sockets. Out: ASGI calls. Must not import: starlette, torch.
"""
