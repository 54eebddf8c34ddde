"""Reports for people: tables, plots and pages made of data, never of live objects."""
