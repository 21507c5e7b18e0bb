"""Sums and merges of whole adapters by a recipe.

In: adapters and weights. Out: a PEFT folder, kept within a byte budget.
"""
