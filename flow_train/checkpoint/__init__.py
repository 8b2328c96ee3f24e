"""Runs on disk: writing, reading, resuming; and the files of other projects."""
