"""rloom: reinforcement-learning post-training of language models."""

import os

__version__ = "0.1.0"

# By default torch's OpenMP threads spin while they wait for each other, which makes a run several times slower as soon
# as another process needs a core. libgomp reads its settings once, when torch loads it, so they are set here: every
# command, Ray worker and reward process imports this package first. What the user has set is left alone.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "passive"
