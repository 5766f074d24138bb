"""`penstock plan`: what a trace would do on engines that do not exist yet. The real planner, in virtual time."""
