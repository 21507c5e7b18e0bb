"""Adapters as files: PEFT's format, images' files, packed layouts, merge methods.

In: folders and files. Out: cards, refusals with a reason, buffers in the layout of the kernels.
Must not import: registry, store, engines, kernels.
"""
