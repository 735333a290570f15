"""Write the embedded arithmetic data set as train.parquet and test.parquet; --help shows the options."""

import os
import sys

# This folder has a math.py, which must not be imported as Python's own: search the repository instead.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))

from rloom.cli.data import script

if __name__ == "__main__":
    sys.exit(script("arithmetic"))
