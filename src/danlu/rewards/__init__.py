"""Rewards: functions from the text of an answer and the columns of its row to a number, a file each.

A reward that cannot be given is None, never 0: it is counted, and left out of means and baselines.
"""
