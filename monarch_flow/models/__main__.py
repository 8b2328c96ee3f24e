"""What a model consists of and costs: `python -m monarch_flow.models NAME [key=value ...]`.

python -m monarch_flow.models
python -m monarch_flow.models 'vit*'
python -m monarch_flow.models vit_small_patch16_224 mlp_cfg=monarch
python -m monarch_flow.models vit_small_patch16_224 mlp_cfg=monarch attnlinear_cfg=monarch
python -m monarch_flow.models vit_tiny_patch4_28 embed_dim=64 depth=2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import oneflow_accel
from oneflow_accel.errors import UserError

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flow_train.metrics.macs import count_parameters, macs_by_module, macs_table
from monarch_flow.models.registry import create_model, describe_model, list_models


def read_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Options from key=value; values are YAML and a dot in a key reaches into a mapping. Raises
    UserError where a pair is of another form."""
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"'{pair}' is not of the form key=value")
    try:
        found: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(pairs)))
    except OmegaConfBaseException as error:
        raise UserError(f"the arguments {' '.join(pairs)} cannot be read: {error}") from error
    return {str(key): value for key, value in found.items()}


def main(arguments: Sequence[str]) -> int:
    """Print the models, or the modules of one; the exit status."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return 0
    oneflow_accel.select_device()
    pattern = arguments[0] if arguments else "*"
    if "*" in pattern or "?" in pattern:
        names = list_models(pattern)
        if not names:
            print(f"error: no model fits {pattern}; without one all are listed", file=sys.stderr)
            return UserError.EXIT_CODE
        width = max(map(len, names))
        print("\n".join(f"{name:{width}}  {describe_model(name)}" for name in names))
        return 0
    name, *pairs = arguments
    try:
        model = create_model(name, **read_arguments(pairs))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    print(macs_table(macs_by_module(model, model.img_size), count_parameters(model).total))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
