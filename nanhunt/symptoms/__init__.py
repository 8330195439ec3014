"""A run from its record: what each step was, how its numbers go, and what is wrong with it."""
