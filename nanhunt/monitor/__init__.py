"""The record of a running training: what is measured at each step, when, and what follows from it."""
