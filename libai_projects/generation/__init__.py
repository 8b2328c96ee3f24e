"""Continuing texts with a language model: greedy, sampling, beam search, streaming."""

from libai_projects.generation.generate import generate, stream
from libai_projects.generation.interface import Cache, StepModel
from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.sequences import GeneratedSequence, Generation

__all__ = [
    "Cache",
    "GeneratedSequence",
    "Generation",
    "GenerationOptions",
    "StepModel",
    "generate",
    "stream",
]
