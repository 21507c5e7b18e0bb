"""The image models: prompts, noise, one forward and the decoder of each family.

In: requests and a loaded pipeline. Out: predictions of rows, and images.
"""
