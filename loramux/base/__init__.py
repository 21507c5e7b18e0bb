"""Small parts without knowledge of the product: JSON, logs, signing, threads, files.

Must not import: anything of loramux but errors.
"""
