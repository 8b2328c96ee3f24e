"""Speed against peers: one command for each table of docs/speed.md."""
