"""Rows judged, changed and dropped, each with its account: pure functions on rows, without a model or torch."""
