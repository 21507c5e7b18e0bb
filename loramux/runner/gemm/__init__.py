"""Dispatch of a decoder's GEMMs by shape, and its autotuner.

In: shapes and a GPU. Out: the fastest algorithm of the tuned table.
"""
