"""Other packages' Kronecker products, run by factorlayer: LoKr layers of PEFT and of LyCORIS, operators of
linear_operator. None of the three is imported before it is needed.

    record = adapters.take_over(model)       # LoKr layers, none of which makes w1 ⊗ w2 from now on
    adapters.give_back(model)
    with adapters.take_over_operators(): …   # KroneckerProductLinearOperator of linear_operator, and so of GPyTorch
"""

from factorlayer.adapters.lokr import give_back, take_over
from factorlayer.adapters.operators import TakenOperators, take_over_operators
from factorlayer.adapters.record import Record

__all__ = ["Record", "TakenOperators", "give_back", "take_over", "take_over_operators"]
