"""Pictures of the documentation, each with the script that draws it."""
