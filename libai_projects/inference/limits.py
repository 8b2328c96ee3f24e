"""What one request to the server may ask for."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """Upper bounds; a request beyond one is refused before it reaches the model.

    Attributes:
        request_bytes: size of a request's body.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens to add to each prompt.
        returns: texts from one prompt.
        seconds: from a request's arrival to its last token, waiting included.
        arrival_seconds: from a connection's opening to the end of a request's head, and from there
            to the end of its body.
        queue: requests that may wait while one runs.
    """

    request_bytes: int = 16_384
    prompt_tokens: int = 256
    new_tokens: int = 256
    returns: int = 8
    seconds: float = 60.0
    arrival_seconds: float = 10.0
    queue: int = 16

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
