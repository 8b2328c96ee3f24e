"""The groups of configs/ and their options: which there are, and which one was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

CONFIGS = Path(__file__).resolve().parent / "configs"
# The folder below it that is no group: what monarch_flow.compare runs.
STUDY = "study"


class Groups:
    """Options by group, such as "model/vitmlp_cfg" or "experiment".

    Args:
        config_dir: a folder with further options of the same groups.

    Raises:
        UserError: `config_dir` is no folder.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        roots = [CONFIGS]
        if config_dir is not None:
            roots.append(Path(config_dir).expanduser())
            if not roots[-1].is_dir():
                raise UserError(f"--config-dir {config_dir}: there is no such folder")
        self._options: dict[str, set[str]] = {}
        for root in roots:
            for file in root.rglob("*.yaml"):
                *folders, name = file.relative_to(root).with_suffix("").parts
                # experiment/imagenet/vit/vit-s.yaml is an option of experiment, and of no
                # experiment/imagenet; model/vitmlp_cfg/fbbfly.yaml is one of model/vitmlp_cfg.
                if folders and folders[0] == "experiment":
                    name, folders = "/".join([*folders[1:], name]), folders[:1]
                if folders and folders[0] != STUDY:
                    self._options.setdefault("/".join(folders), set()).add(name)

    def __contains__(self, group: str) -> bool:
        return group in self._options

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._options))

    def options(self, group: str) -> list[str]:
        """Names of the options, sorted."""
        return sorted(self._options[group])

    def choice(self, group: str, value: Any) -> str:
        """hydra's override for a chosen option, or for several options one after the other.

        Raises:
            UserError: there is no such option; names the nearest.
        """
        names = value if isinstance(value, list) else [value]
        found = [self._option(group, name) for name in names]
        return f"{group}=[{','.join(found)}]" if isinstance(value, list) else f"{group}={found[0]}"

    def unknown(self, group: str) -> str:
        """What to say of a group that is not there."""
        near = difflib.get_close_matches(group, self, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"there is no group {group}; {hint}The groups are {', '.join(self)}"

    def _option(self, group: str, value: Any) -> str:
        # null reads like the wish for nothing, which is the option `none` where there is one.
        name = "none" if value is None else str(value).removesuffix(".yaml")
        if name in self._options[group]:
            return name
        options = self.options(group)
        near = difflib.get_close_matches(name, options, n=3, cutoff=0.5)
        if not near:
            # vit-monarch for mnist/vit-monarch.
            near = [option for option in options if option.rsplit("/", 1)[-1] == name][:3]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        listed = f"The options are {', '.join(options)}" if len(options) <= 20 else "See --help"
        raise UserError(f"{group}={name}: there is no such option; {hint}{listed}")
