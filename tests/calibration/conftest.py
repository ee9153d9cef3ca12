"""Fixtures of several files of these tests."""

from tests.support.comparison import equal_jobs_are_played_once, made, predictions  # noqa: F401
from tests.support.train_command import found  # noqa: F401
