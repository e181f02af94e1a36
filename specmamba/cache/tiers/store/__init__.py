"""A tier on Mooncake Store: memory of several machines, which their engines share. Installed as an extra."""
