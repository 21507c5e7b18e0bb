"""The HTTP server: routes of all APIs, names, access, receipts, streaming.

In: bodies of requests. Out: calls of a TextBackend or ImageBackend, and answers.
Must not import: torch, router.
"""
