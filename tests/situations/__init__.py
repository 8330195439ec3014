"""Programs that must give the same bits whether they are watched or not."""
