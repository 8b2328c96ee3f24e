"""Monarch matrices (Dao et al. 2022) as layers, vision models made of them, and their training."""
