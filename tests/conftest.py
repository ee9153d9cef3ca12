"""What holds for all tests."""

import os

# pytest-xdist tells its workers how wide the terminal is; output is read here as a pipe that nobody has told.
os.environ.pop("COLUMNS", None)
