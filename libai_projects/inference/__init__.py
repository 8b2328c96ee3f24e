"""Text generation for people and programs: the pipeline, its command line, and its server."""
