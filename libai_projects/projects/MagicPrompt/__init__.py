"""MagicPrompt: GPT-2 that writes prompts for text-to-image models."""
