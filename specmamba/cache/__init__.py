"""The only owner of mutable state: pools, tables, per-request buffers, and the plans that point into them."""
