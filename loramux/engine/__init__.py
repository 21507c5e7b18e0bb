"""The text engine: step loop, its process, tokenizer, chat templates, `LLM`.

In: Request. Out: token events and deltas. Must not import: a web framework, server.
"""
