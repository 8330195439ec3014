"""A fault as a folder that replays anywhere: written, read with suspicion, run again, cut down."""
