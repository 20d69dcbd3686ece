"""Parts that the whole package shares; nothing here imports torch."""
