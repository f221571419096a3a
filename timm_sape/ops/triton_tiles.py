"""How the Triton kernels are launched: tiles, warps and registers, by the sizes of what they compute.

For heads of 64 channels and 16 bits these were the fastest of what was tried on an H200 or H100, see `results/h200`.
The rest was chosen by the instructions and the memory that `.ci/check_spills.py` counts.
"""
from functools import lru_cache
from typing import Dict, NamedTuple, Optional, Tuple

from .triton_common import padded

__all__ = ['ALL', 'CODES', 'TOKENS', 'BackwardLaunch', 'Tiles', 'backward_launches', 'codes_options', 'forward_tiles']


class Tiles(NamedTuple):
    """How a kernel of `triton_distances` is launched."""
    own: int  # tokens that a program owns
    visit: int  # tokens that it visits at a time
    warps: int
    stages: int = 1  # of the software pipeline; 1 for none
    registers: Optional[int] = None  # of a thread at most, so that more programs run at a time; None for no limit

    def options(self) -> Dict[str, Optional[int]]:
        """For Triton."""
        return {'num_warps': self.warps, 'num_stages': self.stages, 'maxnreg': self.registers}


class BackwardLaunch(NamedTuple):
    """One launch of `_backward`: its tiles, its pass, and which gradients it computes."""
    tiles: Tiles
    key_pass: bool
    delta_only: bool = False
    tokens: bool = False
    codes_x: bool = False
    codes_y: bool = False

    def constants(self) -> Dict[str, object]:
        return {
            'KEY_PASS': self.key_pass,
            'DELTA_ONLY': self.delta_only,
            'GRAD_TOKENS': self.tokens,
            'GRAD_X': self.codes_x,
            'GRAD_Y': self.codes_y,
        }


class CodesLaunch(NamedTuple):
    """How the kernels of `triton_codes` are launched. For stages and registers see `Tiles`."""
    warps: int  # twice as many, and no limit of registers, for long heads and for both sources
    stages: int = 1
    forward_registers: Optional[int] = None
    backward_registers: Optional[int] = None


ALL, TOKENS, CODES = ('tokens', 'codes_x', 'codes_y'), ('tokens',), ('codes_x', 'codes_y')
# By padded head dim and padded codes.
FORWARD_16_BITS = {
    (64, 16): Tiles(64, 32, 4, registers=128),
    (64, 32): Tiles(64, 32, 4),
    (64, 64): Tiles(64, 64, 4),
    (128, 16): Tiles(64, 32, 4),
    (128, 32): Tiles(64, 32, 4),
    (128, 64): Tiles(64, 32, 4),
}
# The launches of a pass: what each computes, and its tiles.
BACKWARD_16_BITS = {
    (64, 16): [(ALL, Tiles(64, 16, 4, stages=2, registers=168))],
    (64, 32): [(ALL, Tiles(64, 32, 4, stages=2))],
    (64, 64): [(ALL, Tiles(128, 32, 8, stages=2))],
    (128, 16): [(ALL, Tiles(128, 32, 8))],
    (128, 32): [(TOKENS, Tiles(64, 32, 4, stages=2)), (CODES, Tiles(64, 32, 4, stages=2))],
    (128, 64): [(TOKENS, Tiles(128, 32, 8)), (CODES, Tiles(128, 32, 8))],
}
# Of the kernels of `triton_codes`, by padded codes.
CODES_16_BITS = {
    16: CodesLaunch(1, stages=3, backward_registers=168),
    32: CodesLaunch(2, forward_registers=128),
    64: CodesLaunch(4),
}
FORWARD_32_BITS = DELTA_32_BITS = Tiles(64, 16, 4)
BACKWARD_32_BITS = {  # by padded codes
    16: [(ALL, Tiles(64, 16, 8))],
    32: [(TOKENS, Tiles(32, 32, 4)), (CODES, Tiles(32, 16, 4))],
}
CODES_32_BITS = {
    16: CodesLaunch(4),
    32: CodesLaunch(8),
}


def forward_tiles(head_dim: int, code: int, itemsize: int) -> Tiles:
    """For a padded head dim, the wider of the padded codes, and the bytes of a number of q."""
    return FORWARD_32_BITS if itemsize > 2 else FORWARD_16_BITS[max(64, head_dim), code]


@lru_cache
def backward_launches(head_dim: int, code: int, itemsize: int) -> Tuple[BackwardLaunch, ...]:
    """In their order. Arguments as for `forward_tiles`."""
    if itemsize > 2:
        launches, of_pass = [BackwardLaunch(DELTA_32_BITS, key_pass=False, delta_only=True)], BACKWARD_32_BITS[code]
    else:
        launches, of_pass = [], BACKWARD_16_BITS[max(64, head_dim), code]
    for key_pass in (False, True):
        launches += [BackwardLaunch(tiles, key_pass, **dict.fromkeys(outputs, True)) for outputs, tiles in of_pass]
    return tuple(launches)


@lru_cache
def codes_options(head_dim: int, length: int, itemsize: int, sources: int, backward: bool) -> Dict[str, Optional[int]]:
    """For Triton. `sources` is how many of q and k the table is multiplied with."""
    launch = (CODES_32_BITS if itemsize > 2 else CODES_16_BITS)[padded(length)]
    is_wide = head_dim > 64 or sources > 1
    registers = launch.backward_registers if backward else launch.forward_registers
    return {
        'num_warps': launch.warps * (2 if is_wide else 1),
        'num_stages': launch.stages,
        'maxnreg': None if is_wide else registers,
    }
