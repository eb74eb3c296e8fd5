"""A world of many small clauses whose worth depends on what the policy can do by now: the drift d says how much."""
