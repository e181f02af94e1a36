"""Tool calls: what clients may ask for, how each family of models writes calls, and how a call is forced."""
