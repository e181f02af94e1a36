"""HTTP around the routes: connections, reading, limits, keys, errors."""
