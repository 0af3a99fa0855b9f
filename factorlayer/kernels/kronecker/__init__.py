"""Families that take several factors of a Kronecker product at one visit."""
