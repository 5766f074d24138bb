"""What all streams between processes have in common: frames of messages, and heartbeats."""
