"""Speed against peers: one command for each table of the README."""
