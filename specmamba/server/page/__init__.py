"""The live page: its files, and the events that feed it."""
