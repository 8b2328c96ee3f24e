"""A Llama trained from scratch, with its fused operations switched off one by one."""
