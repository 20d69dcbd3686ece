"""What every part of the package shares; nothing here imports torch."""
