"""The audit: what is wrong before the first step, by rules that look at the state, and at one example or step."""
