"""Rows of the table: which peer counts, and what is not for a machine."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from benchmarks.__main__ import Bench
from benchmarks.items import BEST, COMPILED, EAGER, Item
from tests.benchmarks.test_side_by_side import side

ITEM = Item("train", "gpt2", "gpt2_train", {}, 1.0, peers=BEST, stock=False)


@pytest.fixture
def bench():
    made = Bench(sys.executable, threads=1, rounds=2, stock=False)
    made.ours = side("ours", 0.002)
    made.peers = {EAGER: side("torch", 0.004), COMPILED: side("torch", 0.003)}
    yield made
    made.stop()


def test_the_fastest_peer_counts_and_the_others_are_said(bench: Bench) -> None:
    row = bench.row(ITEM)
    assert (row.peer, row.ours_ms, row.peer_ms, row.ratio) == (COMPILED, "2", "3", "1.5")
    assert row.note == "PyTorch: 4 ms"
    assert row.versions == "ours 1.0, torch 1.0"


def test_figures_are_of_one_part_of_a_step(bench: Bench) -> None:
    row = bench.row(replace(ITEM, parts=4))
    assert (row.ours_ms, row.peer_ms, row.ratio) == ("0.5", "0.75", "1.5")
    assert row.note == "PyTorch: 1 ms"


def test_a_peer_that_ends_leaves_the_other(bench: Bench) -> None:
    bench.peers[COMPILED] = side("torch", 0.003, 'sys.exit("no compiler")')
    row = bench.row(ITEM)
    assert (row.peer, row.ratio) == (EAGER, "2")
    assert row.note == "torch.compile: no compiler"


def test_an_item_over_another_of_ours_has_no_peer(bench: Bench) -> None:
    bench.items["train"], bench.base = ITEM, side("base", 0.006)
    row = bench.row(replace(ITEM, name="train, bf16 over float32", against="train", peers=()))
    assert (row.peer, row.peer_ms, row.ratio, row.against) == ("", "", "3", "train")
