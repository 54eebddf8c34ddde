"""`danlu eval`: how well a model predicts, scores or answers the rows of a file."""
