"""Training logs that exist already, read into steps: one file for each family of formats."""
