"""Strategies of hypothesis: every value that JSON can carry, for every option of generation."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from libai_projects.generation import GenerationOptions
from libai_projects.inference.options import FOR_CALLERS

OPTIONS = [name for name in GenerationOptions.model_fields if name not in FOR_CALLERS]
# The same examples in each run, and as many as time allows; a loaded machine is no fault.
BOUNDED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)

# Numbers at which float32, float64, int32 or int64 end, or a division does.
_EDGES = [
    0.0, -0.0, 5e-324, 1e-300, 1e-45, 1.2e-38, 1e-7, 1e-3, 0.5, 1.0, 1.0000001, 2.0, 10.0, 100.0,
    1e6, 3.4e38, 3.5e38, 1e300, 1.7e308,
]  # fmt: skip
FLOATS = st.sampled_from([*_EDGES, *(-edge for edge in _EDGES)]) | st.floats(allow_nan=False)
WHOLE = st.sampled_from(
    [0, 1, -1, 2, 3, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400]
) | st.integers(-5, 300)
TEXTS = st.text(max_size=30) | st.text(
    st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010, categories=None), max_size=5
)
SCALARS = st.none() | st.booleans() | WHOLE | FLOATS | TEXTS
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


def mostly(common: st.SearchStrategy, rare: st.SearchStrategy) -> st.SearchStrategy:
    """One in ten is of the second; `|` would take each as often."""
    return st.integers(0, 9).flatmap(lambda number: common if number else rare)


# Values that mostly fit, so that a request gets past the checks and to the arithmetic.
_FITTING: dict[str, st.SearchStrategy[Any]] = {
    "max_length": st.integers(1, 40),
    "max_new_tokens": st.none() | st.integers(1, 6),
    "min_length": st.integers(0, 12),
    "min_new_tokens": st.none() | st.integers(0, 4),
    "bad_words_ids": st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=3), max_size=3),
    "suppress_tokens": st.none() | st.lists(st.integers(0, 300), max_size=50),
    "min_p": st.none() | st.floats(0, 1),
    "do_sample": st.booleans(),
    "early_stopping": st.booleans() | st.just("never"),
    "num_beams": st.integers(1, 4),
    "num_beam_groups": st.just(1),
    "diversity_penalty": st.just(0.0),
    "temperature": FLOATS.map(abs),
    "top_k": st.none() | st.integers(0, 60),
    "top_p": st.none() | st.floats(0, 1),
    "typical_p": st.none() | st.floats(0, 1),
    "repetition_penalty": FLOATS.map(abs),
    "length_penalty": FLOATS,
    "no_repeat_ngram_size": st.integers(0, 5),
    "num_return_sequences": st.integers(1, 3),
    "max_time": st.none() | st.floats(0.0, 2.0),
    "use_cache": st.booleans(),
    "bos_token_id": st.integers(0, 60),
    "pad_token_id": st.integers(0, 60),
    "eos_token_id": st.none() | st.integers(0, 60) | st.lists(st.integers(0, 60), max_size=4),
    "forced_bos_token_id": st.none() | st.integers(0, 60),
    "forced_eos_token_id": st.none() | st.integers(0, 60),
    "remove_invalid_values": st.booleans(),
    "exponential_decay_length_penalty": st.none()
    | st.tuples(st.integers(0, 4), FLOATS.map(abs)).map(list),
    "renormalize_logits": st.booleans(),
    "seed": st.integers(0, 2**40) | st.lists(st.integers(0, 9), max_size=2),
}


def options(wrong: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    """Some options by name, most of them fitting; with `wrong` now and then one that is not."""

    def one(name: str) -> st.SearchStrategy[Any]:
        fitting = _FITTING.get(name, ANYTHING)
        return mostly(fitting, ANYTHING) if wrong else fitting

    return st.lists(st.sampled_from(OPTIONS), max_size=5, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: one(name) for name in names})
    )
