"""Who asks, and what the caller may do: keys, tokens, scopes, quotas, audit.

In: headers of a request. Out: Caller. Must not import: a room above it.
"""
