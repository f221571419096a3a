"""Checks of numbers that users give as keywords."""
import torch

__all__ = ['MAX_INTEGER', 'is_integer', 'is_number']

#: No integer among the arguments of a model is larger, so that none asks for tables that no memory holds.
MAX_INTEGER = 10 ** 6


def is_integer(value, least: int) -> bool:
    """Whether a value is an integer that is not less than `least`. True and False are not integers here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value) -> bool:
    """Whether a value is a real number that float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= torch.finfo(torch.float32).max  # False for NaN
