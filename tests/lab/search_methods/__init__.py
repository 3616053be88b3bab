"""Comparison of search methods for docs/search.md: what each finds, and after how many passes."""
