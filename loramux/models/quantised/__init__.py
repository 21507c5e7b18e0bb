"""Quantised checkpoints, dequantised module by module.

In: packed weights and scales. Out: float weights of a linear layer.
"""
