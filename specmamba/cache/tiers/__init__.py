"""Prefixes outside of the pools: entries, their bytes, a folder of them on disk, and the threads that move them."""
