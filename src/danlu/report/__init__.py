"""What people look at: tables, plots and pages made of data, never of live objects."""
