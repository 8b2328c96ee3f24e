"""Samples for masked-language-model and sentence-order pretraining (Devlin et al. 2019; Lan et al.
2020), of a dataset in LiBai's mmap format."""

from __future__ import annotations

from typing import Any

from oneflow_accel.errors import DataError, UserError

import numpy as np
import oneflow as flow
from libai.data.structures import DistTensorData, Instance

from libai_projects.text.indexed_dataset import MMapTokenDataset
from libai_projects.text.tokenizer import WordPieceTokenizer

IGNORED = -1
# Of the places that are predicted: these show the mask, a random token, the token itself.
MASKED, RANDOM = 0.8, 0.1


class MaskedText:
    """Sentences of one document in a row, as many as fit into `max_seq_length` tokens: [CLS], they,
    [SEP], and without `masked_lm_only` as two parts, each with a [SEP], in half of the samples
    exchanged. `share` of the tokens are to be predicted; of them 80 % are [MASK], 10 % a random
    token and 10 % themselves.

    A sample depends on its number and `seed` alone. All samples follow each other `copies` times,
    with other masks each time, as in BERT's own files.

    Raises DataError where the dataset is damaged, has ids that are not the tokenizer's, or, if
    pairs are wanted, no document of two sentences; UserError for a tokenizer without these tokens.
    """

    def __init__(
        self,
        data_prefix: str,
        max_seq_length: int,
        tokenizer: Any,
        masked_lm_only: bool = False,
        share: float = 0.15,
        copies: int = 10,
        seed: int = 1234,
    ) -> None:
        if not isinstance(tokenizer, WordPieceTokenizer):
            raise UserError(
                f"{data_prefix}: masked text needs a WordPiece tokenizer, with [CLS], [SEP] and "
                "[MASK]; projects/BERT/prepare.py --train-vocabulary makes one"
            )
        self._ids = MMapTokenDataset(data_prefix, tokenizer.vocab_size)
        self._tokenizer, self._length, self._pairs = tokenizer, max_seq_length, not masked_lm_only
        self._share, self._copies, self._seed = share, copies, seed
        self._room = max_seq_length - (3 if self._pairs else 2)
        self._samples = self._cut()
        if not self._samples:
            raise DataError(
                f"{data_prefix} has no document of two sentences or more: make it with prepare.py "
                "--split-sentences, or train with model.cfg.masked_lm_only=true"
            )

    def _cut(self) -> list[tuple[int, int]]:
        """First sentence and end of each sample."""
        sizes, documents = self._ids.sizes.tolist(), self._ids.doc_idx.tolist()
        least, found = 1 + self._pairs, []
        for first, end in zip(documents[:-1], documents[1:], strict=True):
            begin, tokens = first, 0
            for sentence in range(first, end):
                tokens += sizes[sentence]
                is_full = tokens >= self._room and sentence + 1 - begin >= least
                if is_full or (sentence + 1 == end and sentence + 1 - begin >= least):
                    found.append((begin, sentence + 1))
                    begin, tokens = sentence + 1, 0
        return found

    def __len__(self) -> int:
        return len(self._samples) * self._copies

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids`, `labels`, `attention_mask` and `tokentype_ids`, (max_seq_length,) int64,
        and of pairs `ns_labels` (), 1 where the parts are exchanged."""
        draw = np.random.default_rng([self._seed, index])
        first, end = self._samples[index % len(self._samples)]
        sentences = [self._ids.get(each) for each in range(first, end)]
        kind = self._tokenizer
        parts, is_exchanged = [np.concatenate(sentences)[: self._room]], False
        if self._pairs:
            cut = int(draw.integers(1, len(sentences)))
            a, b = np.concatenate(sentences[:cut]), np.concatenate(sentences[cut:])
            is_exchanged = bool(draw.random() < 0.5)
            a, b = (b, a) if is_exchanged else (a, b)
            # The longer part gives way.
            a = a[: max(self._room - len(b), self._room // 2)]
            parts = [a, b[: self._room - len(a)]]
        ids = np.full(self._length, kind.pad_token_id, np.int64)
        types, mask = np.zeros((2, self._length), np.int64)
        ids[0], end = kind.cls_token_id, 1
        for number, part in enumerate(parts):
            after = end + len(part)
            ids[end:after], ids[after] = part, kind.sep_token_id
            types[end : after + 1] = number
            end = after + 1
        mask[:end] = 1
        found = {"attention_mask": mask, "tokentype_ids": types}
        if self._pairs:
            found["ns_labels"] = np.array(is_exchanged, np.int64)
        return {**self._masked(ids, end, draw), **found}

    def _masked(
        self, ids: np.ndarray, end: int, draw: np.random.Generator
    ) -> dict[str, np.ndarray]:
        kind, labels = self._tokenizer, np.full(len(ids), IGNORED, np.int64)
        inner = np.flatnonzero((ids[1:end] != kind.sep_token_id)) + 1
        count = max(1, round(self._share * len(inner)))
        chosen = draw.permutation(inner)[:count]
        labels[chosen] = ids[chosen]
        way = draw.random(len(chosen))
        random = draw.choice(kind.words, len(chosen))
        ids[chosen] = np.where(
            way < MASKED,
            kind.mask_token_id,
            np.where(way < MASKED + RANDOM, random, ids[chosen]),
        )
        return {"input_ids": ids, "labels": labels}

    def __getitem__(self, index: int) -> Instance:
        last = ("labels", "ns_labels")
        return Instance(
            **{
                name: DistTensorData(flow.tensor(array), placement_idx=-(name in last))
                for name, array in self.arrays(int(index)).items()
            }
        )
