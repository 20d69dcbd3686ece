"""What a trained encoder says about anybody's images: vectors, clusters, neighbours, classes."""
