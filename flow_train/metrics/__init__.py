"""What a run says and keeps of its course: lines, logs, curves, counts."""
