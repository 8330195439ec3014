"""Before the Inf: headroom of a whole run, and the same step in two precisions."""
