"""Prompts in, texts out: a tokenizer, a model that reads tokens, and the options between them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import numpy as np

from libai_projects.generation import GenerationOptions, StepModel, generate
from libai_projects.inference import lockstep

# The options of LiBai's MagicPrompt, used where nothing else is given.
DEFAULT_OPTIONS = {"max_length": 50}


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


@dataclass(frozen=True)
class Words:
    """What --serve says of a model: its name, what it does, a prompt to begin with, and what its
    texts are called."""

    title: str = "Text generation"
    task: str = "Type the beginning of a text. The model continues it."
    example: str = "Once upon a time"
    text: str = "text"


class TextPipeline:
    """Continues texts. Every rank makes one and calls it alike; rank 0 gets the texts.

    `model` reads tokens; `name` is what /api/health calls it, `words` what the page says; `options`
    differ from GenerationOptions' defaults. Raises UserError for a wrong option, or a tokenizer of
    another vocabulary than the model's.
    """

    def __init__(
        self,
        model: StepModel,
        tokenizer: Any,
        *,
        name: str = "model",
        words: Words = Words(),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer.vocab_size != model.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}: "
                "give the vocabulary that the model was trained with (--vocab-file, --merges-file)"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.name, self.words = name, words
        self.max_positions = model.max_positions
        special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
        self.options = GenerationOptions.from_config(
            {**DEFAULT_OPTIONS, **special, **(options or {})}
        )

    def __call__(
        self, inputs: str | Sequence[str], batch_size: int | None = None, **kwargs: Any
    ) -> list[dict[str, str]] | dict[str, str]:
        """Continue one text or several, `batch_size` at once (None: all), with generation options.

        Returns on rank 0 a list of {"generated_text": str}, `num_return_sequences` for each input,
        in order, on others {}. Raises UserError for an option or a text that cannot be used.
        """
        prompts = [inputs] if isinstance(inputs, str) else list(inputs)
        size = batch_size or max(len(prompts), 1)
        texts: list[GeneratedText] = []
        for first in range(0, max(len(prompts), 1), size):
            options = dict(kwargs)
            if isinstance(seed := options.get("seed", self.options.seed), int):
                # A prompt's own seed does not depend on the batches it is cut into.
                options["seed"] = seed + first
            texts += self.generate(prompts[first : first + size], **options)
        distributed.barrier()
        if not distributed.is_main():
            return {}
        return [{"generated_text": text.text} for text in texts]

    def count_tokens(self, text: str) -> int:
        """How many tokens a text is; a UserError for what is not text. From any thread."""
        return len(self._encode(text))

    def check_options(self, options: Mapping[str, Any]) -> GenerationOptions:
        """The options with these changed, or a UserError where `generate` would refuse them; from
        any thread."""
        chosen = self.options.replace(**options)
        # The default may be too long for a small model; who asks for a length wants it.
        counts = "max_length" in options and chosen.max_new_tokens is None
        if counts and chosen.max_length > self.max_positions:
            raise UserError(
                f"max_length is {chosen.max_length}, but the model has {self.max_positions} "
                f"positions: ask for {self.max_positions} tokens at most"
            )
        return chosen

    @lockstep.in_step()
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
            on_text: called on rank 0 with (index of the result, text added to it) as it comes;
                with beam search all text comes at the end, and none here.
            should_stop: asked on rank 0 before each token; None goes on, a reason ("time",
                "cancelled") ends the call with what there is.
        """
        chosen = self.check_options(options)
        reason: list[str] = []
        if should_stop is not None:
            criteria = (*chosen.stopping_criteria, _criterion(should_stop, reason))
            chosen = chosen.replace(stopping_criteria=criteria)
        ids = [self._encode(prompt) for prompt in prompts]
        decoders: dict[int, Any] = defaultdict(self.tokenizer.stream_decoder)

        def say(index: int, text: str) -> None:
            if text and on_text is not None and distributed.is_main():
                on_text(index, text)

        generation = generate(
            _Agreed(self.model),
            ids,
            chosen,
            clock=_shared_clock,
            on_token=lambda index, token: say(index, decoders[index].feed(token)),
        )
        for index, decoder in decoders.items():
            say(index, decoder.finish())
        return [
            GeneratedText(
                prompt=sequence.prompt,
                text=prompts[sequence.prompt] + self.tokenizer.decode(sequence.new_tokens),
                new_tokens=len(sequence.new_tokens),
                finish_reason=_reason(sequence.finish_reason, reason),
            )
            for sequence in generation.sequences
        ]

    def _encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except ValueError as error:
            raise UserError(str(error)) from error


class _Agreed:
    """A model whose steps begin only when no rank has failed (`lockstep`)."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(
        self, ids: np.ndarray, positions: np.ndarray, mask: np.ndarray | None, cache: Any
    ) -> np.ndarray:
        lockstep.exchange()
        try:
            return self._model.step(ids, positions, mask, cache)
        except UserError:
            # The model finds these errors before it begins, and on every rank.
            raise
        except Exception as error:
            if distributed.world_size() == 1:
                raise
            raise lockstep.OutOfStepError(f"{type(error).__name__}: {error}") from error


def _shared_clock() -> float:
    """Rank 0's time in seconds: all ranks have to stop at the same token."""
    return lockstep.exchange(time.monotonic() if distributed.is_main() else 0.0)


def _criterion(
    should_stop: Callable[[], str | None], reason: list[str]
) -> Callable[[np.ndarray, np.ndarray | None], bool]:
    def stop(_ids: np.ndarray, _scores: np.ndarray | None) -> bool:
        answer = should_stop()
        if answer is not None:
            reason.append(answer)
        return lockstep.exchange(float(answer is not None)) > 0

    return stop


def _reason(finish: str, reason: Sequence[str]) -> str:
    if finish == "criterion" and reason:
        return reason[0]
    # The model's last position is an end by length, too.
    return "length" if finish == "positions" else finish
