"""Origins of files: one module for each kind of source.

In: an address that was checked. Out: a listing, and ranges of bytes.
"""
