"""The textbook behind reinforcement learning, exact and in numpy: chains, rewards, decisions, planning, gradients.

Read in this order: `markov_chain.py`, `markov_reward_process.py`, `markov_decision_process.py`, `planning.py`,
`policy_gradient.py`. Nothing of danlu imports this room: it is what estimators are compared with in tests, and what
docs/rl.md explains with. The notation is that of Sutton and Barto, Reinforcement Learning: An Introduction (2nd ed.).

S states · A actions · gamma discount
"""
