"""What the Triton kernels take, known without importing Triton; `.ci/check_spills.py` compiles them."""
LIMITS = {  # whether q has more than 16 bits: largest head dim, largest codes; beyond, they would spill registers
    False: (128, 64),
    True: (64, 32),
}
MIN_CAPABILITY = 8.0  # of an NVIDIA GPU: the least that Triton supports


def shared_memory(code: int) -> int:
    """KiB that a program needs at most, by the largest code. A GPU has 227 for one (H100), 163 (A100), 99 (others)."""
    return 99 if code <= 32 else 163
