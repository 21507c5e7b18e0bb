"""Tool calls and reasoning: schemas of tools, parsers of answers.

In: tools of a request and tokens of an answer. Out: calls in the shape of the API.
"""
