"""Families of untied contractions: a Monarch layer's."""
