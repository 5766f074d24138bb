"""One run: what a seed draws, the loop, the read-only view of the core, and the judge."""
