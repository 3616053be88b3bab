"""What every package stands on: files, strings and numbers from outside, measurements, locks."""
