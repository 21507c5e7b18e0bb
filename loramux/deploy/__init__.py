"""Specs of models and their deployment, on this machine or on Ray Serve.

In: a ModelSpec. Out: `loramux serve` processes behind a router.
Only this package may import Ray, and only in the modules named ray_*.
"""
