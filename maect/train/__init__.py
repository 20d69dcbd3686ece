"""The training engine: the three stages, exactly resumable on any number of ranks."""
