"""One forward pass of the target model or of its draft."""
