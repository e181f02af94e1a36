"""``specmamba train``: draft heads for models that have none."""
