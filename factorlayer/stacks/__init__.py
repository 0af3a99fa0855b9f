"""Layers one behind another that run as one, how they are found in a module, and their frozen weights."""
