"""Model families over shared layers, draft heads, and tokenizers."""
