"""Programs in answers: they run in a sandbox, and a judge outside of it runs the tests on proxies of their objects."""
