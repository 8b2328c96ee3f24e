"""Where the config.yaml of an older run finds its data set; it is in `text/loaders.py` now."""

from libai_projects.text.loaders import RandomTokens, TokenFiles

__all__ = ["RandomTokens", "TokenFiles"]
