"""GPT-2: options, model, and its steps for generation."""
