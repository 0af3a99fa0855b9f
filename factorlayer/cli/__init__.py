"""The command line: check, profile, bench and cache."""
