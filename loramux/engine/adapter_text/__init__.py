"""Tokenizers and chat templates of adapters, read in processes with limits.

In: files that are not trusted. Out: descriptions and rendered prompts.
"""
