"""What watching costs: the measurements behind the tables of the README, one noun a file."""
