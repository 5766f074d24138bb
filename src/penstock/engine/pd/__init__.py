"""Prefill/decode disaggregation in the engine process: remote instances and where requests meet."""
