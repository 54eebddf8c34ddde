"""The run that `danlu demo` shows: its data, recipes and steps."""
