"""KV cache layers that a draft can write behind."""
