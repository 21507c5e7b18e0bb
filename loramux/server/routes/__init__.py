"""Routes of OpenAI's API, of adapters, registry, reports and A1111's API.

In: bodies of requests. Out: answers; behind a route no code knows the wire format.
"""
