"""A vision transformer of 10 billion parameters, cut over the processes that train it."""
