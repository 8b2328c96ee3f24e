"""Prompts in, texts out: a tokenizer, a model that reads tokens, and the options between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import numpy as np

from libai_projects.generation import GenerationOptions, generate
from libai_projects.generation.interface import StepModel
from libai_projects.generation.sequences import FinishReason
from libai_projects.inference import lockstep
from libai_projects.inference.texts import GeneratedText, OnPiece, Prompt, Texts

# The options of LiBai's MagicPrompt, used where nothing else is given.
DEFAULT_OPTIONS = {"max_length": 50}


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

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """The token ids of a prompt; a UserError for what is not text. From any thread."""
        if not isinstance(prompt, str):
            return prompt
        try:
            return self.tokenizer.encode(prompt)
        except ValueError as error:
            raise UserError(str(error)) from error

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
        prompts: Sequence[Prompt],
        *,
        on_text: OnPiece | None = None,
        should_stop: Callable[[], FinishReason | None] | None = None,
        **options: Any,
    ) -> list[GeneratedText]:
        """Continue each prompt; `num_return_sequences` results for each, in order.

        Every rank calls it alike. A UserError, for an option or a prompt, is raised on all ranks,
        so that the next call finds them together; after a lockstep.OutOfStepError there is no next
        call.

        Args:
            on_text: told on rank 0 each piece of a text as it comes; with beam search all text
                comes at the end, and none here.
            should_stop: asked on rank 0 before each token; None goes on, a reason ("time",
                "cancelled") ends the call with what there is.
        """
        chosen = self.check_options(options)
        reason: list[FinishReason] = []
        if should_stop is not None:
            criteria = (*chosen.stopping_criteria, _criterion(should_stop, reason))
            chosen = chosen.replace(stopping_criteria=criteria)
        ids = [self.encode(prompt) for prompt in prompts]
        beams = chosen.num_beams > 1
        say = on_text if distributed.is_main() and not beams else None
        texts = Texts(self.tokenizer, prompts, chosen, say)
        generation = generate(
            _Agreed(self.model),
            ids,
            chosen.replace(stop_strings=()),
            clock=_shared_clock,
            on_token=texts.feed,
        )
        for index, sequence in enumerate(generation.sequences):
            for token in sequence.new_tokens if beams else ():
                texts.feed(index, token)
            if sequence.finish_reason == "criterion" and reason:
                sequence.finish_reason = reason[0]
        return texts.finish(generation.sequences)


class _Agreed:
    """A model whose steps begin only when no rank has failed (`lockstep`)."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, step: Any, cache: Any) -> np.ndarray:
        lockstep.exchange()
        with lockstep.collective():
            return self._model.run(step, cache)


def _shared_clock() -> float:
    """Rank 0's time in seconds: all ranks have to stop at the same token."""
    return lockstep.exchange(time.monotonic() if distributed.is_main() else 0.0)


def _criterion(
    should_stop: Callable[[], FinishReason | None], reason: list[FinishReason]
) -> Callable[[np.ndarray, np.ndarray | None], bool]:
    def stop(_ids: np.ndarray, _scores: np.ndarray | None) -> bool:
        answer = should_stop()
        if answer is not None:
            reason.append(answer)
        return lockstep.exchange(float(answer is not None)) > 0

    return stop
