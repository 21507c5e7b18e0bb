"""DoRA magnitudes, biases and full modules of each row's adapters.

In: device tables. Out: corrected outputs of linears, norms and embeddings.
"""
