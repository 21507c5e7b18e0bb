"""Rewriting of refused adapters: pickles, old tensor names, other data types.

In: a folder as a trainer left it. Out: a PEFT folder of safetensors.
"""
