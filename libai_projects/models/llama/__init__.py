"""Llama: options, rotary angles, model, and its steps for generation."""
