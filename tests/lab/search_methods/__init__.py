"""Ways of searching, compared: what each finds, and after how many passes. For docs/search.md."""
