"""Names of adapters: views, sums, folders, sources, pins, locks.

In: a name and a caller. Out: CIDs and weights. Must not import: a room above it.
"""
