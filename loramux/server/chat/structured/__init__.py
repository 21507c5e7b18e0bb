"""Structured answers: from the fields of a body to one checked grammar.

In: schemas, regexes, choices. Out: Grammar, or a refusal with its reason.
"""
