"""The command ``parallel-runtime``: arguments, tables, exit codes."""

__all__: list[str] = []
