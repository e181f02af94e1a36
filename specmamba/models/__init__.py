"""Model families over shared layers, draft heads, tokenizers, and the reading of checkpoints."""
