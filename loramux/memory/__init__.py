"""Memory of a device: page pool, tiers, residency, prefix cache, eviction.

In: requests for pages and adapters. Out: pages, leases, loads. Must not import: engine, models.
"""
