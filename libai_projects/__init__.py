"""Projects on LiBai: GPT-2 "MagicPrompt", and what such projects share."""
