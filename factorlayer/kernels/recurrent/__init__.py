"""Gated recurrent units, whose recurrent weights stay on chip over all steps."""
