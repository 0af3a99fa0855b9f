"""Whole models: layers swapped for structured ones and back, structures proposed, and what that changes."""
