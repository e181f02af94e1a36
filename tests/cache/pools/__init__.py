"""Tests of where the tensors of pools lie, and in which layout."""
