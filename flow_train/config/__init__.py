"""Values of configurations: what is typed, and what is checked."""
