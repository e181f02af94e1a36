"""Where the bundled demo checkpoint comes from: its corpus, its training program, its prompts."""
