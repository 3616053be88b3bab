"""What a draft consists of: how far to draft, and prompt lookup."""
