"""The planner: pure, deterministic, standard library only. See `core.Core`."""
