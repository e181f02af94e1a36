"""The bundled demo: a small hybrid model in Hugging Face layout. See MODEL_CARD.md."""
