"""Foundations of all packages: files, strings and numbers from outside, measurements, locks."""
