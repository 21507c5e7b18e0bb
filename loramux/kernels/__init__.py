"""The operations of a forward pass: Protocols, one selector, four implementations.

In: tensors. Out: tensors.
Must not import: anything above it; triton only in gpu/, numba only in cpu_jit/.
"""
