"""Text in and out of token ids: GPT-2's tokenizer, and the datasets that training reads."""
