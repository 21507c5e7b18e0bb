"""The image engine: pipelines of diffusers with adapters for each row of a forward.

In: ImageRequest. Out: pixels, partial images, files.
Only this package may import diffusers; it must not import engine or a web framework.
"""
