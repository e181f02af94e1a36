"""Matrices of layers that are read in more than one form."""
