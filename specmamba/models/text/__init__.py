"""From text to tokens and back: tokenizers, special tokens, text that grows, prompts with a gap."""
