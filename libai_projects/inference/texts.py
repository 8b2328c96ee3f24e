"""Texts that are being written: pieces of whole characters, where stop strings end them, and what
is said of them at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from libai_projects.generation.sequences import TokenScore


@dataclass(frozen=True)
class ScoredToken:
    """A new token, its log probability, and the likeliest texts in its place with theirs. It begins
    after `offset` characters of new text."""

    text: str
    logprob: float
    top: dict[str, float]
    offset: int

    def as_dict(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.logprob, "top": self.top}


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
            answer["logprobs"] = [score.as_dict() for score in self.scores]
        return answer


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
        self._held = before[len(before) - self._begun(before) :] if keeps_stop else ""
        # So much of what is held is the prompt's.
        self._given = len(self._held)
        self._stopped = False
        self._told = 0

    def feed(self, token: int, score: TokenScore | None = None) -> bool:
        """Take the next token; whether a stop string has ended the text."""
        if score is not None:
            decode, top = self._tokenizer.decode, score.top
            offset = len(self.text) + len(self._held) - self._given
            likely = {decode([each], skip_special=False): value for each, value in top}
            text = decode([token], skip_special=False)
            self.scores.append(ScoredToken(text, score.logprob, likely, offset))
        self._add(self._decoder.feed(token))
        return self._stopped

    def finish(self, reason: str) -> None:
        if not self._stopped:
            self._add(self._decoder.finish())
        text, self._held = self._held[self._given :], ""
        self._say(text, reason)

    def _begun(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop string."""
        lengths = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)

    def _add(self, new: str) -> None:
        text = self._held + new
        found = []
        for stop in self._stops:
            # One that the prompt has whole is none.
            at = text.find(stop, max(0, self._given + 1 - len(stop)))
            found += [(at + len(stop), at)] if at >= 0 else []
        if found:
            # The first that is whole.
            end, begin = min(found)
            text, ready = text[: end if self._keeps_stop else begin], None
            self._stopped = True
        else:
            ready = len(text) - self._begun(text)
        said = text[self._given : ready]
        self._held = "" if ready is None else text[ready:]
        self._given = max(0, self._given - len(text) + len(self._held))
        if self._stopped and not self._keeps_stop:
            length = len(self.text) + len(said)
            self.scores = [score for score in self.scores if score.offset < length]
        if said:
            self._say(said)

    def _say(self, text: str, reason: str | None = None) -> None:
        self.text += text
        if self._on_piece is None:
            return
        end = len(self.text) + (reason is not None)
        ready = [score for score in self.scores[self._told :] if score.offset < end]
        self._told += len(ready)
        self._on_piece(Piece(self._index, text, ready, reason))
