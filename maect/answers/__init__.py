"""A trained encoder on anybody's images: vectors, clusters, neighbours, classes."""
