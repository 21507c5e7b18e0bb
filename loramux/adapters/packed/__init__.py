"""Adapters in the layouts of the device: dense, pages, fp12, extras.

In: checked tensors. Out: one buffer with a header, as a file or in host memory.
"""
