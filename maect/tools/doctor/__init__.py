"""`maect doctor`: whether a site is ready for an experiment, each fault with a hint."""
