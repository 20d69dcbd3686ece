"""Parts that the whole package shares; only `distributed` imports torch."""
