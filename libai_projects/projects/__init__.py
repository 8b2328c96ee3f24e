"""One folder per project."""
