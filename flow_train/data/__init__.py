"""Image data for training: sources, augmentation, mixing, and the loaders of a run."""
