"""The engine's process: its loop around the core, its peer, its recorder."""
