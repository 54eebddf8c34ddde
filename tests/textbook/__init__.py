"""The textbook behind reinforcement learning, exact and in numpy: chains, rewards, decisions, planning, gradients.

Read in this order: `markov_chain.py`, `markov_reward_process.py`, `markov_decision_process.py`, `planning.py`,
`policy_gradient.py`. Tests compare estimators with it. The notation is that of Sutton and Barto, Reinforcement
Learning: An Introduction (2nd ed.).

S states · A actions · gamma discount
"""
