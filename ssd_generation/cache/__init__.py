"""KV caches that drafts share with the target, recurrent states, and prefixes stored between calls."""
