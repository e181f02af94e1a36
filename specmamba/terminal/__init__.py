"""Commands for people and scripts in a terminal: prompts answered as JSON, and conversations."""
