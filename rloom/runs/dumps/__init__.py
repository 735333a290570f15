"""The answers of a run, with their tokens, in its directory: `rollouts/`. `rloom view` reads them."""
