"""Fake ranks in virtual time: clock, devices, storage, and a language model of hashes."""
