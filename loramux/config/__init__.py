"""Settings of `serve`: fields with limits, the TOML file, data paths.

In: flags, files, environment. Out: frozen dataclasses. Must not import: any engine, torch.
"""
