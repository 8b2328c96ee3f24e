"""What the server, the JSON-lines mode and the terminal ask of whatever generates text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class GeneratedText:
    """One text: `prompt` is the index of its prompt in the call, `text` includes the prompt,
    `new_tokens` counts the end-of-text token, `finish_reason` is "eos", "length", "time" or
    "cancelled"."""

    prompt: int
    text: str
    new_tokens: int
    finish_reason: str

    def as_dict(self) -> dict[str, Any]:
        """What the server and the JSON-lines mode answer with."""
        return {
            "generated_text": self.text,
            "new_tokens": self.new_tokens,
            "finish_reason": self.finish_reason,
        }


class TextEngine(Protocol):
    """Generates text; `TextGenerationPipeline` is one, the tests bring another."""

    name: str
    max_positions: int

    def count_tokens(self, text: str) -> int:
        """How many tokens `text` is; called from any thread."""
        ...

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises UserError on options that `generate` would refuse; from any thread."""
        ...

    def generate(
        self,
        prompts: Sequence[str],
        *,
        on_text: Callable[[int, str], None] | None = None,
        should_stop: Callable[[], str | None] | None = None,
        **options: Any,
    ) -> list[GeneratedText]:
        """Continue each prompt; `num_return_sequences` results for each, in order.

        Every rank calls it alike. A UserError, for an option or a prompt, is raised on all ranks,
        so that the next call finds them together; after a lockstep.OutOfStepError there is no next
        call.

        Args:
            on_text: called on rank 0 with (index of the result, text added to it) as it comes.
            should_stop: asked on rank 0 before each token; None goes on, a reason ("time",
                "cancelled") ends the call with what there is.
        """
        ...
