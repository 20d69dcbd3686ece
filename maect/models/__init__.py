"""Encoder, decoder and NNCLR head, and how their weights lie on disk."""
