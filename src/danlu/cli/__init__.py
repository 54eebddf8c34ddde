"""The command line: one thin file a verb, and `main`, which is the only place that turns errors into exit codes."""
