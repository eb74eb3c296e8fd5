"""The embedded default: a small world, its tiny policy and its scripted optimizer.

Nothing in the core imports this package: `make train` uses the files under `world/files/` (corpus,
questions, policy) and starts `python -m world.optimizer` as a server, as it would use any other
data set and endpoint.
"""
