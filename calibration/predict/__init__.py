"""Predictions as a file that can be committed before the runs are made."""
