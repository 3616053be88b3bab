"""Measuring programs for maintainers: `python -m tests.lab.NAME` from the root of a checkout, see README.md."""
