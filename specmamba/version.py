"""The version, where the lowest layers can read it: also from a checkout that is not installed."""

__version__ = "0.1.0"
