"""Ground that every room stands on: errors, files, locks, HTTP, worker processes, shared types."""
