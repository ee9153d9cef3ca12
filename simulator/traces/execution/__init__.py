"""Execution traces: graphs of what ranks run, read from Chakra's and PyTorch's files, played, and written."""
