"""Families of one contraction, forward and backward, and the small passes around them."""
