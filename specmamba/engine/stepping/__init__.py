"""One step of an engine: which requests wait, what runs, what it has decided, what clients and statistics are told."""
