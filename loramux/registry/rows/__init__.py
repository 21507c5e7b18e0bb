"""Queries of the registry, one module for each group of tables.

In: a connection. Out: records. Must not open transactions.
"""
