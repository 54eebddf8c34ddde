"""Published measurements of training runs, their models and engines, and the errors of predictions of them."""
