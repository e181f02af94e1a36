"""Layers shared by all model families. They hold weights and see the cache through ``ForwardContext``."""
