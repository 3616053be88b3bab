"""Ways of decoding side by side: one process, the same prompts, taking turns."""
