"""Several processes that share one model: what they exchange, and which part of every matrix each of them has."""
