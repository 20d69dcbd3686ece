"""What an experiment will cost on a site, before it is run."""
