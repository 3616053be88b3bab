"""Methods side by side, prompts, and the folders that runs leave."""
