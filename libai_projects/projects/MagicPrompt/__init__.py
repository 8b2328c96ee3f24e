"""MagicPrompt: GPT-2 that writes prompts for text-to-image models."""

# Before any part of it imports oneflow: see oneflow_accel.
import oneflow_accel  # noqa: F401
