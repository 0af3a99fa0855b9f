"""Families of dense layers one behind another."""
