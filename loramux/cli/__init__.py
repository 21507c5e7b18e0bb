"""The `loramux` command: one module for each command or group.

In: arguments of a shell. Out: text or JSON, and an exit status.
Only this package may import typer and rich; heavy modules are imported in functions.
"""
