"""Single-line faults that the tests of a room must notice: `make mutation`."""
