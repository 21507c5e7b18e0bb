"""Grammars of structured answers: compiler, masks, and the process that checks them.

In: schemas, regexes, tool calls. Out: token masks of each step.
"""
