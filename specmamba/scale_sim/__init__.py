"""Replicas simulated from a trace: ``specmamba bench scale-sim``."""
