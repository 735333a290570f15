"""The Python interface. `import rloom` imports none of it: the names are loaded when they are first used."""
