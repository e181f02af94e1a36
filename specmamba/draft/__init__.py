"""Drafters: what proposes a draft tree for each running request."""
