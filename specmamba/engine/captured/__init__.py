"""Captured steps: their kinds, their inputs, and their replay."""
