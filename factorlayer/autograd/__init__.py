"""The raw ops in PyTorch's world: what they return, how they are differentiated and batched, how kernels are had."""
