"""Callbacks for other people's trainers; each needs its library, and this package alone loads nothing."""
