"""One step of an engine: what runs, what it has decided, and what clients and statistics are told of it."""
