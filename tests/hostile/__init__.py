"""Bad inputs in tables: what a careless or a hostile user gives, and what must come of it."""
