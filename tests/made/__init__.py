"""Things made for tests, shared between the rooms of tests."""
