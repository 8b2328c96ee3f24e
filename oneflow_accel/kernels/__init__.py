"""Which implementation of an operation runs where, and why."""
