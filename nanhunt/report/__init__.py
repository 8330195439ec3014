"""A finding as something to read: text, and the files that hold it."""
