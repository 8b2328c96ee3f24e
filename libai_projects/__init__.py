"""Projects on LiBai: GPT-2 "MagicPrompt", and what such projects share."""

import importlib.util

if importlib.util.find_spec("libai") is None:
    # With this package's name, which makes `python -m libai_projects.X` print it as one line.
    raise ModuleNotFoundError(
        "libai is not installed. `pip install .` leaves it out; in the folder of the repository "
        "this adds it: `pip install -r requirements/build.txt && pip install --no-build-isolation "
        "-r requirements/libai.txt && pip install --no-build-isolation --no-deps libai==0.1.1`",
        name=__name__,
    )
