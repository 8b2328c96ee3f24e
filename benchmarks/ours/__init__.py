"""Our side of the benchmarks: OneFlow with the plug-in, or stock OneFlow without it."""
