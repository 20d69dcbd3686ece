"""Training that resumes exactly, on any number of ranks."""
