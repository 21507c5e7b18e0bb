"""Composition roots: config -> registry and store -> engines -> HTTP application.

In: ServeConfig or a spec. Out: a running server. Must not import: cli, deploy.
"""
