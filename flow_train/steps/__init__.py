"""One optimizer step: eagerly or under nn.Graph, on one process or many."""
