"""Texts that are being written: pieces of whole characters, where stop strings end them, and what
is said of them at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.sequences import GeneratedSequence, TokenScore

# A text, or the token ids of one.
Prompt = str | Sequence[int]


def is_prompt(value: Any) -> bool:
    """Whether what came as JSON is a prompt."""
    is_ids = isinstance(value, list) and {type(each) for each in value} == {int}
    return is_ids or isinstance(value, str)


@dataclass(frozen=True)
class ScoredToken:
    """A new token, its log probability, and the likeliest texts in its place with theirs. It begins
    after `offset` characters of new text."""

    text: str
    logprob: float
    top: dict[str, float]
    offset: int


@dataclass(frozen=True)
class Piece:
    """What text number `index` of a call has more; the last piece, which may be empty, says why the
    text ends. `scores` are of the tokens in it, where they were asked for."""

    index: int
    text: str
    scores: Sequence[ScoredToken] = ()
    finish_reason: str | None = None


OnPiece = Callable[[Piece], None]


@dataclass(frozen=True)
class GeneratedText:
    """One text: `prompt` is the index of its prompt in the call, `text` is the prompt and what was
    `added`, `new_tokens` counts the end-of-text token, `finish_reason` is "eos", "length", "stop",
    "time" or "cancelled"."""

    prompt: int
    text: str
    new_tokens: int
    finish_reason: str
    added: str = ""
    prompt_tokens: int = 0
    scores: Sequence[ScoredToken] | None = None

    def as_dict(self) -> dict[str, Any]:
        """What the server and the JSON-lines mode answer with."""
        answer: dict[str, Any] = {
            "generated_text": self.text,
            "new_tokens": self.new_tokens,
            "finish_reason": self.finish_reason,
        }
        if self.scores is not None:
            answer["logprobs"] = [
                {"token": one.text, "logprob": one.logprob, "top": one.top} for one in self.scores
            ]
        return answer


class Texts:
    """The texts of a call, `num_return_sequences` for each prompt, while their tokens come."""

    def __init__(
        self,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        on_piece: OnPiece | None = None,
        *,
        keeps_stop: bool = True,
    ) -> None:
        self._options = options

        @cache
        def given(number: int) -> str:
            prompt = prompts[number]
            return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)

        @cache
        def text(index: int) -> TextOf:
            stops, before = options.stop_strings, given(index // options.num_return_sequences)
            return TextOf(
                tokenizer, index, before, stops=stops, keeps_stop=keeps_stop, on_piece=on_piece
            )

        self._given, self._text = given, text

    def feed(self, index: int, token: int, score: TokenScore | None = None) -> bool:
        """Take a text's next token; whether a stop string has ended it."""
        return self._text(index).feed(token, score)

    def finish(self, sequences: Iterable[GeneratedSequence]) -> list[GeneratedText]:
        """What is said of the sequences, all of them, at their end."""
        found = []
        for index, sequence in enumerate(sequences):
            text, number = self._text(index), sequence.prompt
            # The model's last position is an end by length, too.
            reason = "length" if sequence.finish_reason == "positions" else sequence.finish_reason
            text.finish(reason)
            found.append(
                GeneratedText(
                    prompt=number,
                    text=self._given(number) + text.text,
                    new_tokens=len(sequence.new_tokens),
                    finish_reason=reason,
                    added=text.text,
                    prompt_tokens=sequence.prompt_length,
                    scores=None if self._options.logprobs is None else text.scores,
                )
            )
        return found


class TextOf:
    """One text while its tokens come; `on_piece` is told what is new of it.

    It ends with the first of `stops`, which may begin in the prompt's text `before`; or, unless
    `keeps_stop`, before one that the new text has whole. What may yet become one is held back.
    """

    def __init__(
        self,
        tokenizer: Any,
        index: int,
        before: str,
        *,
        stops: Sequence[str] = (),
        keeps_stop: bool = True,
        on_piece: OnPiece | None = None,
    ) -> None:
        self.text = ""
        self.scores: list[ScoredToken] = []
        self._tokenizer, self._decoder = tokenizer, tokenizer.stream_decoder()
        self._index, self._on_piece = index, on_piece
        self._stops, self._keeps_stop = stops, keeps_stop
        self._before = before[-max(map(len, stops)) :] if stops and keeps_stop else ""
        self._stopped = False
        # Characters, and scores, that were told.
        self._said = self._told = 0

    def feed(self, token: int, score: TokenScore | None = None) -> bool:
        """Take the next token; whether a stop string has ended the text."""
        if score is not None:
            decode, top = self._tokenizer.decode, score.top
            likely = {decode([each], skip_special=False): value for each, value in top}
            text = decode([token], skip_special=False)
            self.scores.append(ScoredToken(text, score.logprob, likely, len(self.text)))
        self._add(self._decoder.feed(token))
        return self._stopped

    def finish(self, reason: str) -> None:
        if not self._stopped:
            self._add(self._decoder.finish())
        self._say(len(self.text), reason)

    def _add(self, new: str) -> None:
        first, self.text = len(self.text), self.text + new
        whole, given = self._before + self.text, len(self._before)
        found = []
        for stop in self._stops:
            # One that the prompt has whole is none.
            at = whole.find(stop, max(0, given + first + 1 - len(stop)))
            found += [(at + len(stop), at)] if at >= 0 else []
        if found:
            # The first that is whole.
            self._stopped = True
            end, begin = min(found)
            self.text = whole[given : end if self._keeps_stop else begin]
            if not self._keeps_stop:
                self.scores = [score for score in self.scores if score.offset < len(self.text)]
            self._say(len(self.text))
        else:
            self._say(max(self._said, len(self.text) - self._begun(whole)))

    def _begun(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop string."""
        lengths = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)

    def _say(self, end: int, reason: str | None = None) -> None:
        """Tell the text up to `end`, and why it ends there."""
        text, self._said = self.text[self._said : end], end
        if self._on_piece is not None and (text or reason is not None):
            last = end + (reason is not None)
            ready = [score for score in self.scores[self._told :] if score.offset < last]
            self._told += len(ready)
            self._on_piece(Piece(self._index, text, ready, reason))
