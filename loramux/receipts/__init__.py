"""Receipts of answers: claims, digests, signatures, writer.

In: what a request selected and got. Out: signed records. Must not import: torch, server.
"""
