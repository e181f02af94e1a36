"""How many drafts are accepted, what that buys, and whether the text stays the same."""
