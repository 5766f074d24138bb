"""Several tokens a step: who proposes them, and the plan that checks them."""
