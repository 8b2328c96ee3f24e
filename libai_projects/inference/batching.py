"""Many prompts through one model at once: each joins and leaves between two steps of the model.

Process 0 says which tokens of which sequences are read next, and chooses the next ones; the others
are told the `Step` and run it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.generation import PAGE

import numpy as np

from libai_projects.generation import GenerationOptions
from libai_projects.generation.generate import Decoding, OnToken, prepared
from libai_projects.generation.interface import Cache, PagedModel
from libai_projects.generation.sequences import FinishReason, GeneratedSequence, Stopping
from libai_projects.models.pages import Step

# Tokens of prompts that one step reads at most: the others wait no longer for their next token.
CHUNK = 256


def is_batched(options: GenerationOptions) -> bool:
    """Whether texts of these options are written beside others: token by token, with keys and
    values kept, and with no functions of the caller's, which may look at all rows of a call."""
    functions = (options.logits_processor, options.stopping_criteria)
    alone = options.num_beams > 1 or options.output_scores or any(functions)
    return options.use_cache and not alone and options.prefix_allowed_tokens_fn is None


class Group:
    """The texts that continue one prompt. `on_end` gets them, or why there are none. Raises
    UserError where the prompt and its options do not fit the model."""

    def __init__(
        self,
        model: PagedModel,
        prompt: Sequence[int],
        options: GenerationOptions,
        on_token: OnToken,
        on_end: Callable[[list[GeneratedSequence] | Exception], None],
    ) -> None:
        self.rows = prepared(model, [prompt], options)
        self.prompt: list[int] = self.rows.ids[0].tolist()
        self.texts = options.num_return_sequences
        # The last token is never read.
        self.pages = -(-(int(self.rows.limits[0]) - 1) // PAGE)
        shared = len(self.prompt) // PAGE
        self.most_pages = shared + self.texts * (self.pages - shared)
        self.on_end = on_end
        self._model, self._options, self._on_token = model, options, on_token
        self.decoding: Decoding
        # Of the sequences that go on: numbers in the cache and tokens to read next.
        self.numbers: list[int] = []
        self.tokens = np.empty(0, dtype=np.int64)
        self.read = 0

    @property
    def is_reading(self) -> bool:
        """Whether some of the prompt has not been read."""
        return self.read < len(self.prompt)

    def begin(self) -> None:
        """Before the first token; its time runs from here."""
        stopping = Stopping(self._options, self._model.max_positions, time.monotonic)
        self.decoding = Decoding(
            self.rows, self._options, self._model.vocab_size, stopping, self._on_token
        )


class Batcher:
    """The prompts that are being read and continued, `most_texts` texts at most, or one prompt's.
    Every process makes one; process 0 alone knows groups."""

    def __init__(self, model: PagedModel, most_texts: int) -> None:
        self._model, self._most_texts = model, most_texts
        self.groups: list[Group] = []
        # Read and chosen so far.
        self.prompt_tokens = self.tokens = 0
        longest = -(-model.max_positions // PAGE)
        free, pages = model.free_memory(), most_texts * longest
        if free is not None:
            # The other half is for what the steps themselves need, and for requests that run alone.
            pages = min(pages, free // 2 // max(1, model.page_bytes))
        self.capacity = max(longest, pages)
        # Of the step that was planned last: who has how many of its sequences.
        self._parts: list[tuple[Group, int]] = []
        self._cache: Cache = model.new_cache(self.capacity)

    @property
    def texts(self) -> int:
        """How many are read or written now."""
        return sum(each.texts if each.is_reading else len(each.numbers) for each in self.groups)

    def check(self, groups: Sequence[Group]) -> None:
        """A UserError if there can never be room for these at once."""
        needed = sum(group.most_pages for group in groups)
        if needed > self.capacity:
            raise UserError(
                f"{sum(group.texts for group in groups)} texts need up to {needed} pages of {PAGE} "
                f"tokens, and the cache has {self.capacity}: ask for fewer or shorter ones"
            )

    def add(self, groups: Sequence[Group]) -> bool:
        """Begin with all of these, unless they have to wait until there is room for all that they
        may write."""
        if self.groups and self.texts + sum(group.texts for group in groups) > self._most_texts:
            return False
        pages = self._cache.pages
        for group in groups:
            number, group.read = pages.add(group.prompt, share=self._model.shares_prefixes)
            group.numbers = [number]
        if sum(map(self._pages_to_come, [*self.groups, *groups])) > pages.free:
            for group in groups:
                pages.release(group.numbers[0])
            return False
        for group in groups:
            group.begin()
        self.groups += groups
        return True

    def _pages_to_come(self, group: Group) -> int:
        """The most pages that a group will take beyond those that it has."""
        lengths = list(map(self._cache.pages.length, group.numbers))
        if group.is_reading or group.texts == 1:
            return group.most_pages - -(-sum(lengths) // PAGE)
        # Of copies whose last page is one, each may need its own.
        return sum(group.pages - length // PAGE for length in lengths)

    def remove(self, group: Group) -> None:
        """Forget a group, if it is here: its pages are free."""
        if group in self.groups:
            self.groups.remove(group)
            for number in group.numbers:
                self._cache.pages.release(number)

    def end(self, group: Group, reason: FinishReason) -> None:
        """Let a group end with what there is, if it is here."""
        if group in self.groups:
            self.remove(group)
            group.decoding.end(reason)
            group.on_end(group.decoding.sequences)

    def fail(self, error: Exception) -> None:
        """No group has texts, and nobody knows what the cache holds."""
        groups, self.groups = self.groups, []
        self._cache = self._model.new_cache(self.capacity)
        for group in groups:
            group.on_end(error)

    def plan(self) -> Step:
        """The next step: a token of each text, and of the prompts a chunk."""
        rows: list[tuple[int, list[int]]] = []
        readers = [group for group in self.groups if group.is_reading]
        left, self._parts = CHUNK, []
        for group in self.groups:
            if not group.is_reading:
                tokens = group.tokens[:, None].tolist()
                rows += zip(group.numbers, tokens, strict=True)
                self._parts.append((group, len(tokens)))
                continue
            # Who came first may take the chunk, but leaves half of it to those behind.
            most = left if group is readers[-1] else -(-left // 2)
            count = min(most, len(group.prompt) - group.read)
            if not self._model.shares_prefixes:
                # Keys depend on how much is read at once.
                count = len(group.prompt) - group.read
            if count > 0:
                rows.append((group.numbers[0], group.prompt[group.read : group.read + count]))
                group.read += count
                left = max(0, left - count)
                self.prompt_tokens += count
                self._parts.append((group, 1))
        return self._model.plan(self._cache, rows)

    def run(self, step: Step) -> np.ndarray:
        """What the model answers to a step; every process."""
        return self._model.run(step, self._cache)

    def choose(self, logits: np.ndarray) -> None:
        """Go on by what the model answered to the step that was planned last."""
        logits = np.require(logits, np.float32, ["C", "W"])
        end = 0
        for group, count in self._parts:
            begin, end = end, end + count
            if group not in self.groups or group.is_reading:
                continue
            try:
                self._go_on(group, logits[begin:end])
            except Exception as error:
                self.remove(group)
                group.on_end(error)

    def _go_on(self, group: Group, logits: np.ndarray) -> None:
        decoding, pages = group.decoding, self._cache.pages
        if len(group.tokens) == 0:
            number = group.numbers[0]
            if self._model.shares_prefixes:
                pages.remember(number, group.prompt)
            group.numbers += [pages.fork(number) for _ in range(1, group.texts)]
            logits = logits[decoding.copies]
        self.tokens += len(logits)
        going_on, group.tokens = decoding.choose(logits)
        kept = [group.numbers[row] for row in going_on]
        for number in set(group.numbers).difference(kept):
            pages.release(number)
        group.numbers = kept
        if not kept:
            self.remove(group)
            group.on_end(decoding.sequences)
