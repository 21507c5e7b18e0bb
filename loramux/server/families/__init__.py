"""APIs of other servers: a module for each family.

In: its wire shape. Out: a GenerationBody, and the answer in its shape.
"""
