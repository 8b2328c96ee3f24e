"""State of the random generators, as plain JSON, for checkpoints that resume bit for bit.

`Generator.get_state` of oneflow 0.9.0 cannot be used for that: on CPU it returns the 624 words of
the Mersenne Twister without the position inside them, elsewhere it leaves out a Philox offset, so a
restored generator agrees with the live one only directly after it was seeded. A checkpoint
therefore moves oneflow on to a fresh, named stream: its seed is what is stored, and the run that
goes on and the run that resumes both start at its beginning.

Not covered are generators that an operator keeps for itself, as dropout does under nn.Graph.
"""

from __future__ import annotations

import hashlib
import logging
import random
from typing import Any

from oneflow_accel.agree import on_rank_0
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import oneflow

logger = logging.getLogger("oneflow_accel")


def settled_seed(asked: int | None, began_with: int | None = None, *, option: str) -> int:
    """The seed that was asked for, or the one that a resumed run began with, or one that is drawn,
    the same in every process.

    Args:
        asked: None for any.
        began_with: None for a new run.
        option: what is typed before the seed, such as "--seed ".

    Raises:
        UserError: another seed is asked for than the resumed run's.
    """
    if began_with is not None:
        if asked not in (None, began_with):
            raise UserError(
                f"{option}{asked}: the run to resume began with {began_with}, which its "
                "order of images depends on; leave it out, or give that one"
            )
        return began_with
    if asked is not None:
        return asked
    drawn = on_rank_0(lambda: random.SystemRandom().randrange(2**31))
    logger.info("seed %d", drawn)
    return drawn


def seed_all(seed: int, backend: Backend) -> None:
    """Seed OneFlow's (the CPU's and the backend's), Python's and numpy's generators of this process
    with the same number; numpy takes its lowest 32 bits."""
    backend.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def get_rng_state() -> dict[str, Any]:
    """State of this process's Python, numpy and oneflow generators: {"python": list, "numpy": dict,
    "oneflow": {"seed": int}}, ready for JSON.

    Moves oneflow's default generators (of all devices) on to a fresh stream, so that this process
    and one that restores the state draw the same numbers from here on. The new seed is a hash of
    the old one: two runs that take checkpoints at the same steps draw the same numbers throughout.
    In a distributed run every process calls it at the same step and each state is kept, see
    `distributed.all_gather_json`.
    """
    version, internal_state, gauss_next = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    if numpy_state["bit_generator"] != "MT19937":
        raise RuntimeError(
            f"numpy's global generator is {numpy_state['bit_generator']}, expected MT19937"
        )
    seed = seed_of(f"oneflow_accel stream after {oneflow.initial_seed()}")
    oneflow.manual_seed(seed)
    return {
        "python": [version, list(internal_state), gauss_next],
        "numpy": {
            "key": numpy_state["state"]["key"].tolist(),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "oneflow": {"seed": seed},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators where they were when `get_rng_state` returned `state`; CheckpointError if
    it is not such a state."""
    try:
        version, internal_state, gauss_next = state["python"]
        python_state = (version, tuple(internal_state), gauss_next)
        numpy_state = {
            "bit_generator": "MT19937",
            "state": {
                "key": np.array(state["numpy"]["key"], dtype=np.uint32),
                "pos": state["numpy"]["position"],
            },
            "has_gauss": state["numpy"]["has_gauss"],
            "gauss": state["numpy"]["gauss"],
        }
        seed = int(state["oneflow"]["seed"])
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's state of the random generators is malformed ({error!r}); "
            "resume from another checkpoint"
        ) from error
    oneflow.manual_seed(seed)


def seed_of(text: str) -> int:
    """A 63-bit seed that depends only on `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def named_generator(seed: int, name: str) -> np.random.Generator:
    """NumPy's generator for one named thing, such as a parameter: the same on every process, and
    whatever else is drawn."""
    digest = hashlib.sha256(f"oneflow_accel {seed}, {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """A 63-bit seed for one training step of one process. A run that seeds with it before each step
    draws the same numbers there wherever it was resumed and whenever checkpoints were written."""
    return seed_of(f"oneflow_accel {seed}, step {step}, process {rank}")
