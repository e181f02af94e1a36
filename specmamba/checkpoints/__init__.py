"""Checkpoints: where they are found, what their configs say, and their tensors by name."""
