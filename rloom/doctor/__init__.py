"""`rloom doctor`: checks of this machine's installation."""
