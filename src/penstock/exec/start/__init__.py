"""From a configuration to an engine that has proved itself."""
