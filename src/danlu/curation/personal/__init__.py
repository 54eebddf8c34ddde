"""Personal data in texts: where it stands, by kinds, and rows in which it is masked."""
