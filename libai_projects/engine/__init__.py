"""A LiBai config on flow_train: what it is made of, its steps, its losses, a run."""
