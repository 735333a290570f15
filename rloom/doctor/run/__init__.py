"""What is wrong with a run and what to try. Pure functions over what the run has written; imports no torch."""
