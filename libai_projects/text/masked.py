"""Samples for masked-language-model and sentence-order pretraining (Devlin et al. 2019; Lan et al.
2020), of a dataset in LiBai's mmap format."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from oneflow_accel.errors import DataError, UserError

import numpy as np
import oneflow as flow
from libai.data.structures import DistTensorData, Instance

from libai_projects.text.indexed_dataset import MMapTokenDataset


class MaskedText:
    """Sentences of one document in a row, as many as fit into `max_seq_length` tokens: [CLS], they,
    [SEP], and without `masked_lm_only` as two parts, each with a [SEP], in half of the samples
    exchanged. `share` of the tokens are to be predicted; of them 80 % are [MASK], 10 % a random
    token and 10 % themselves.

    A sample depends on its number and `seed` alone. All samples follow each other `copies` times,
    with other masks each time, as in BERT's own files.

    Raises DataError where the dataset is damaged, has ids that are not the tokenizer's, or, if
    pairs are wanted, no document of two sentences; UserError for a tokenizer without [MASK].
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
        if getattr(tokenizer, "mask_token_id", None) is None:
            raise UserError(
                f"{data_prefix}: masked text needs a tokenizer with [MASK], as "
                "projects/BERT/prepare.py --train-vocabulary makes one"
            )
        self._ids = MMapTokenDataset(data_prefix, tokenizer.vocab_size)
        self._tokenizer, self._length, self._pairs = tokenizer, max_seq_length, not masked_lm_only
        self._share, self._copies, self._seed = share, copies, seed
        self._room = max_seq_length - 2 - self._pairs
        self._samples = self._cut()
        if not self._samples:
            raise DataError(
                f"{data_prefix} has no document of two sentences or more: make it with prepare.py "
                "--split-sentences, or train with model.cfg.masked_lm_only=true"
            )

    def _cut(self) -> list[tuple[int, int]]:
        """First sentence and end of each sample."""
        sizes, least, found = self._ids.sizes.tolist(), 1 + self._pairs, []
        for begin, last in pairwise(self._ids.doc_idx.tolist()):
            tokens = 0
            for end in range(begin + 1, last + 1):
                tokens += sizes[end - 1]
                if end - begin >= least and (tokens >= self._room or end == last):
                    found.append((begin, end))
                    begin, tokens = end, 0
        return found

    def __len__(self) -> int:
        return len(self._samples) * self._copies

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids`, `labels`, `attention_mask` and `tokentype_ids`, (max_seq_length,) int64,
        and of pairs `ns_labels` (), 1 where the parts are exchanged."""
        draw, kind = np.random.default_rng([self._seed, index]), self._tokenizer
        first, last = self._samples[index % len(self._samples)]
        sentences = [self._ids.get(each) for each in range(first, last)]
        cut = int(draw.integers(1, len(sentences))) if self._pairs else len(sentences)
        is_exchanged = self._pairs and draw.random() < 0.5
        parts = [np.concatenate(sentences[:cut])]
        if self._pairs:
            parts.append(np.concatenate(sentences[cut:]))
            a, b = reversed(parts) if is_exchanged else parts
            # The longer part gives way.
            a = a[: max(self._room - len(b), self._room // 2)]
            parts = [a, b[: self._room - len(a)]]
        ids = np.full(self._length, kind.pad_token_id, np.int64)
        types, mask = np.zeros((2, self._length), np.int64)
        ids[0], end = kind.bos_token_id, 1
        for number, part in enumerate(parts):
            after = end + len(part[: self._room])
            ids[end:after], ids[after] = part[: self._room], kind.eos_token_id
            types[end : after + 1] = number
            end = after + 1
        mask[:end] = 1
        labels = np.full(self._length, -1, np.int64)
        inner = np.flatnonzero(ids[1:end] != kind.eos_token_id) + 1
        chosen = draw.permutation(inner)[: max(1, round(self._share * len(inner)))]
        labels[chosen] = ids[chosen]
        way, random = draw.random(len(chosen)), draw.integers(0, kind.vocab_size, len(chosen))
        ids[chosen] = np.where(way < 0.9, random, ids[chosen])
        ids[chosen[way < 0.8]] = kind.mask_token_id
        found = {"input_ids": ids, "labels": labels, "attention_mask": mask, "tokentype_ids": types}
        return found | ({"ns_labels": np.array(is_exchanged, np.int64)} if self._pairs else {})

    def __getitem__(self, index: int) -> Instance:
        fields = {
            name: DistTensorData(flow.tensor(array), placement_idx=-name.endswith("labels"))
            for name, array in self.arrays(int(index)).items()
        }
        return Instance(**fields)
