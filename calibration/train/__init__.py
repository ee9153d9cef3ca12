"""Really train workload files with PyTorch."""
