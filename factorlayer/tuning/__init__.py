"""Measured choice: which implementation was faster for a layer where it runs, timed, kept and looked up."""
