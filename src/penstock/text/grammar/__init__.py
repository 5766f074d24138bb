"""Grammars of structured output are checked in a process with limits."""
