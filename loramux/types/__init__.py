"""Values that layers exchange: requests, plans, cards, limits.

In and out: frozen dataclasses without behaviour of a layer. Must not import: torch, any layer.
"""
