"""Pretraining of BERT on LiBai, with structured layers first and dense ones later."""
