"""The documented place of `timm_sape.lab.position_data`."""
from .lab.position_data import *  # noqa: F401,F403
