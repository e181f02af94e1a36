"""Model families, one short file each over shared layers, and the reading of their checkpoints."""
