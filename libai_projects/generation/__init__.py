"""Continuing texts with a language model: greedy, sampling, beam search, streaming."""

from libai_projects.generation.generate import generate
from libai_projects.generation.interface import StepModel
from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.sequences import Generation

__all__ = ["Generation", "GenerationOptions", "StepModel", "generate"]
