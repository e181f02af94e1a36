"""Tests of the tiers below the pools with whole engines."""
