"""Routes of image models: OpenAI's, sheaf's, edits, sums of adapters.

In: bodies of requests. Out: ImageRequest, files, events.
"""
