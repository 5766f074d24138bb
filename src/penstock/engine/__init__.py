"""The engine process: one turn takes messages and events, plans a step and sends what it sampled."""
