"""verl's import paths: advantage functions over padded tensors (`core_algos`) and reward functions (`reward_score`)."""
