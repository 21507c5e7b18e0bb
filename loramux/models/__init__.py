"""Decoder families as data, loaders of weights, and the forward pass.

In: a checkpoint. Out: logits of a step. Must not import: scheduler, runner, engine.
"""
