"""Images to shards, shards to batches, batches to augmented views."""
