"""Engines of several ranks: every rank has the whole engine on its part of the model, and they get the same calls."""
