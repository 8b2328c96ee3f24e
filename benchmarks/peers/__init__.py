"""The peers' side of the benchmarks: PyTorch, timm and transformers, in .venv-peer; imports nothing
of ours."""
