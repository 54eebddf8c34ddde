"""Published rules for the quality of documents: C4, Gopher, and FineWeb's, with their thresholds."""
