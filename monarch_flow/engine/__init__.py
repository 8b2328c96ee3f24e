"""The training engine: from a composed configuration to a trained and tested model."""
