"""Models of the Hugging Face hub: choice of files, checks, download, cache.

In: org/name@revision. Out: a folder or a file. Must not import: torch.
"""
