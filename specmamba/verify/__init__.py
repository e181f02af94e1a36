"""Acceptance: what the target decides about a draft tree."""
