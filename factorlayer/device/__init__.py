"""What a kernel is written for: a GPU's limits and rates, and the device code as text."""
