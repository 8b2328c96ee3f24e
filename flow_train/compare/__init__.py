"""Several training runs side by side: what they are, how they run, one table and one picture."""
