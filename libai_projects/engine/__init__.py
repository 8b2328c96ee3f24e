"""Our layer over LiBai's engine: command line, checks before the start, training, evaluation."""
