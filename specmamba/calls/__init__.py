"""The calls of Python callers: their prompts, the outputs that are collected for them, and a bar that shows how far."""
