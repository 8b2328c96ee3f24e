"""From a command line to a checked config: flags, keys, files, and what the device lacks."""
