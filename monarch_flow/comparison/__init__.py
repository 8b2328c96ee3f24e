"""Several training runs side by side: what they are, how they are run, one table and one picture."""
