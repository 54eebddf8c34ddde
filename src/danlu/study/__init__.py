"""A study: one recipe trained with some of its values varied. `plan` says which runs, `runner` trains them."""
