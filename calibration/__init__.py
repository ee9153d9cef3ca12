"""Calibration: the shipped profiles of GPUs, and the scripts that fit their constants to measurements."""
