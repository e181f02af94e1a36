"""Training of small models to try draft heads on."""
