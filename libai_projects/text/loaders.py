"""Datasets, samplers and loaders that take the place of LiBai's in our trainer.

LiBai's samplers give each process its own share of the data, so that layouts see different batches
and a resumed run takes other samples. Its blocks of tokens leave out all but the first sentence of
a document, and the last block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oneflow_accel.errors import DataError

import numpy as np
import oneflow as flow
from libai import evaluation
from libai.data import build, data_utils, datasets, samplers, structures
from libai.data.data_utils import split_ds
from libai.utils import distributed as dist
from omegaconf import DictConfig, ListConfig
from oneflow.utils.data.dataset import ConcatDataset

from libai_projects.text.indexed_dataset import get_indexed_dataset
from libai_projects.text.perplexity import PPLEvaluator
from libai_projects.text.token_files import TokenWindows


class CyclicSampler(samplers.CyclicSampler):
    """One stream of samples for all processes: one permutation of the dataset after another.

    Each process takes its part of every global batch, so samples depend on their position in the
    stream only, and a run that resumes, on whatever layout, goes on with the sample after the last
    one. No sample is left out: a batch may hold samples of two epochs. Arguments are LiBai's; an
    empty dataset is a DataError.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.data_size == 0:
            raise DataError(
                "the training set is empty: add data, or change dataloader.train.splits"
            )

    def __iter__(self) -> Iterator[list[int]]:
        position, epoch, order = self.consumed_samples, -1, range(0)
        while True:
            begin = position + self.data_parallel_rank * self.micro_batch_size
            batch = []
            for place in range(begin, begin + self.micro_batch_size):
                if place // self.data_size != epoch:
                    epoch = place // self.data_size
                    order = _order(self, self.seed + epoch)
                    self._prefetch(order, place % self.data_size, (epoch + 1) * self.data_size)
                batch.append(order[place % self.data_size])
            position += self.actual_batch_size
            self.consumed_samples += self.actual_batch_size
            yield batch

    def _prefetch(self, order: Sequence[int], first: int, end: int) -> None:
        """Tell a dataset that can use it which samples, from `first` of the epoch that ends at
        stream position `end`, this process takes."""
        if not getattr(self.dataset, "supports_prefetch", False):
            return
        offset = self.consumed_samples % self.actual_batch_size
        rank, ranks = self.data_parallel_rank, self.data_parallel_size
        places = range(end - self.data_size + first, end)
        self.dataset.prefetch(
            [
                order[place % self.data_size]
                for place in places
                if (place - offset) // self.micro_batch_size % ranks == rank
            ]
        )


class SingleRoundSampler(samplers.SingleRoundSampler):
    """Once through the data: global batch k holds samples [k * B, (k + 1) * B) on any layout.

    In a smaller last batch all processes take equally many samples: copies of sample 0 fill up its
    end. Arguments are LiBai's.
    """

    def __iter__(self) -> Iterator[list[int]]:
        order = _order(self, self.seed)
        global_batch_size = self.micro_batch_size * self.data_parallel_size
        batches = []
        for begin in range(0, self.data_size, global_batch_size):
            size = min(global_batch_size, self.data_size - begin)
            if size < global_batch_size and self.drop_last:
                break
            share = -(-size // self.data_parallel_size)
            first = begin + self.data_parallel_rank * share
            places = range(first, first + share)
            batches.append([order[place] if place < self.data_size else 0 for place in places])
        if getattr(self.dataset, "supports_prefetch", False):
            self.dataset.prefetch([index for batch in batches for index in batch])
        yield from batches


def _order(sampler: Any, seed: int) -> Sequence[int]:
    """The samples of an epoch."""
    if not sampler.shuffle:
        return range(sampler.data_size)
    generator = flow.Generator()
    generator.manual_seed(seed)
    return flow.randperm(sampler.data_size, generator=generator).tolist()


class BlockIndexedDataset(data_utils.BlockIndexedDataset):
    """All tokens of an indexed dataset in blocks of `max_seq_length + 1`, neighbours sharing one:
    there are (tokens - 1) // max_seq_length. DataError where the dataset does not fill one."""

    def __init__(self, data_prefix: str, indexed_dataset: Any, max_seq_length: int = 512) -> None:
        self.max_seq_length = max_seq_length
        self.indexed_dataset = indexed_dataset
        # By sequence, the number of tokens up to its end.
        self._ends = np.cumsum(indexed_dataset.sizes, dtype=np.int64)
        tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._blocks = (tokens - 1) // max_seq_length
        if self._blocks < 1:
            raise DataError(
                f"the dataset {data_prefix} has {tokens} tokens, and one sample takes "
                f"{max_seq_length + 1} (max_seq_length + 1): add text or lower max_seq_length"
            )

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, index: int) -> np.ndarray:
        position = int(index) * self.max_seq_length
        # The first sequence that ends after it, which passes over empty ones.
        sequence = int(np.searchsorted(self._ends, position, side="right"))
        start = position - (int(self._ends[sequence - 1]) if sequence else 0)
        parts, lacking = [], self.max_seq_length + 1
        while lacking:
            parts.append(self._tokens(sequence, start, start + lacking))
            lacking -= len(parts[-1])
            sequence, start = sequence + 1, 0
        return np.concatenate(parts)

    def _tokens(self, sequence: int, start: int, stop: int) -> np.ndarray:
        if not hasattr(self.indexed_dataset, "get"):
            return self.indexed_dataset[sequence][start:stop]
        stop = min(stop, int(self.indexed_dataset.sizes[sequence]))
        return self.indexed_dataset.get(sequence, offset=start, length=stop - start)


class GPT2Dataset(datasets.GPT2Dataset):
    """LiBai's samples of GPT over `BlockIndexedDataset`."""

    def __init__(
        self, tokenizer: Any, data_prefix: str, indexed_dataset: Any, max_seq_length: int = 512
    ) -> None:
        self.dataset = BlockIndexedDataset(data_prefix, indexed_dataset, max_seq_length)
        self.tokenizer = tokenizer


class RandomTokens:
    """Random tokens in the form of GPT2Dataset: to try out and to measure without data."""

    def __init__(
        self, vocab_size: int, max_seq_length: int, samples: int = 16384, tokenizer: Any = None
    ) -> None:
        self._vocab_size, self._length, self._samples = vocab_size, max_seq_length, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> structures.Instance:
        draw = np.random.default_rng(index)
        tokens = flow.tensor(draw.integers(0, self._vocab_size, self._length + 1))
        return structures.Instance(
            input_ids=structures.DistTensorData(tokens[:-1]),
            labels=structures.DistTensorData(tokens[1:], placement_idx=-1),
        )


class TokenFiles:
    """`TokenWindows` in the form of GPT2Dataset; LiBai passes `tokenizer`, which is not needed."""

    def __init__(self, *args: Any, tokenizer: Any = None, **options: Any) -> None:
        self._windows = TokenWindows(*args, **options)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> structures.Instance:
        inputs, labels, segments = self._windows[int(index)]
        fields = {
            "input_ids": structures.DistTensorData(flow.tensor(inputs)),
            "labels": structures.DistTensorData(flow.tensor(labels), placement_idx=-1),
        }
        if segments is not None:
            fields["segments"] = structures.DistTensorData(flow.tensor(segments))
        return structures.Instance(**fields)


def _training(libais: Callable[..., Any]) -> Callable[..., Any]:
    """A builder of LiBai's for a training loader, with our sampler."""

    def train_loader(
        dataset: Any,
        train_batch_size: int,
        *,
        sampler: Any = None,
        consumed_samples: int = 0,
        seed: int = 0,
        dataset_mixer: Callable[[list[Any]], Any] = ConcatDataset,
        **options: Any,
    ) -> Any:
        parts = list(dataset) if isinstance(dataset, list | ListConfig) else [dataset]
        dataset = dataset_mixer(parts) if len(parts) > 1 else parts[0]
        sampler = sampler or CyclicSampler(
            dataset,
            train_batch_size,
            shuffle=True,
            consumed_samples=consumed_samples,
            data_parallel_rank=dist.get_data_parallel_rank(),
            data_parallel_size=dist.get_data_parallel_size(),
            seed=seed,
        )
        return libais(dataset, train_batch_size, sampler=sampler, **options)

    return train_loader


def _testing(libais: Callable[..., Any]) -> Callable[..., Any]:
    """A builder of LiBai's for a loader to evaluate, with our sampler."""

    def test_loader(
        dataset: Any, test_batch_size: int, *, sampler: Any = None, **options: Any
    ) -> Any:
        sampler = sampler or SingleRoundSampler(
            dataset,
            test_batch_size,
            data_parallel_rank=dist.get_data_parallel_rank(),
            data_parallel_size=dist.get_data_parallel_size(),
        )
        return libais(dataset, test_batch_size, sampler=sampler, **options)

    return test_loader


build_nlp_train_loader = _training(build.build_nlp_train_loader)
build_nlp_test_loader = _testing(build.build_nlp_test_loader)


def build_nlp_train_val_test_loader(
    dataset: Any,
    splits: Sequence[Sequence[float]],
    weights: Sequence[float],
    train_batch_size: int,
    test_batch_size: int,
    *,
    sampler: Any = None,
    consumed_samples: int = 0,
    dataset_mixer: Callable[[list[Any]], Any] = ConcatDataset,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Loaders for training, validation and test, by LiBai's arguments; None for a split of ratio 0
    or without samples. Raises DataError where nothing is left for training."""
    parts = list(dataset) if isinstance(dataset, list | ListConfig) else [dataset]
    assert len(parts) == len(splits) == len(weights), "datasets, splits, weights: one of each"
    # As floats: LiBai divides them in place, which numpy refuses for whole numbers.
    shares = [
        split_ds(part, [float(share) for share in split])
        for part, split in zip(parts, splits, strict=True)
    ]

    def mixed(number: int) -> Any:
        found = [share[number] for share in shares if share[number] is not None]
        found = [share for share in found if len(share) > 0]
        return dataset_mixer(found) if found else None

    training, *evaluated = (mixed(number) for number in range(3))
    if training is None:
        raise DataError(
            f"the training split is empty: add data, or change dataloader.train.splits={splits}"
        )
    train_loader, _, _ = build_nlp_train_loader(
        training, train_batch_size, sampler=sampler, consumed_samples=consumed_samples, **options
    )
    loaders = [
        share and build_nlp_test_loader(share, test_batch_size, sampler=sampler, **options)
        for share in evaluated
    ]
    return train_loader, loaders[0], loaders[1]


_OURS: dict[Any, Any] = {
    build.build_nlp_train_val_test_loader: build_nlp_train_val_test_loader,
    build.build_nlp_train_loader: build_nlp_train_loader,
    build.build_nlp_test_loader: build_nlp_test_loader,
    build.build_image_train_loader: _training(build.build_image_train_loader),
    build.build_image_test_loader: _testing(build.build_image_test_loader),
    datasets.GPT2Dataset: GPT2Dataset,
    data_utils.get_indexed_dataset: get_indexed_dataset,
    evaluation.PPLEvaluator: PPLEvaluator,
}
_BY_NAME = {f"{each.__module__}.{each.__qualname__}": ours for each, ours in _OURS.items()}


def use_ours(node: Any) -> None:
    """Let a node of a config call ours in place of LiBai's, so that LiBai's configs run here."""
    if not isinstance(node, DictConfig | ListConfig):
        return
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    if isinstance(target, str) or callable(target):
        node["_target_"] = (_BY_NAME if isinstance(target, str) else _OURS).get(target, target)
    for key in node if isinstance(node, DictConfig) else range(len(node)):
        # Not node[key]: that resolves, and an interpolation may point at what is not set yet.
        use_ours(node._get_node(key))
