"""MAE-CT: contrastive tuning of masked autoencoders, from raw images to the paper's tables."""

__version__ = "0.1.0"
