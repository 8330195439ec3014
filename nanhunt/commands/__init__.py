"""The commands, one a file: what each word after `nanhunt` understands, and does."""
