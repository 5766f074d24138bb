"""Programs over many runs: sweeps, waste, waiting times, traces, and smaller failures."""
