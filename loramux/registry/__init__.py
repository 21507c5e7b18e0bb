"""Names, versions, aliases, tenants, keys and the audit log, in SQLite or PostgreSQL.

In: names. Out: CIDs, records, rights. Must not import: torch, server, store.
"""
