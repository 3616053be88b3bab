"""The quality of what is generated, beside its speed."""
