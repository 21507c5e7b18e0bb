"""Files of image adapters by their headers.

In: a file or a folder. Out: its manifest, origin and refusals. Must not import: torch.
"""
