"""``specmamba tune``: choosing draft trees by measurement."""
