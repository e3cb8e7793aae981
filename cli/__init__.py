"""The specrun command: one file a command."""
