"""What the Triton kernels take without spilling registers, known without importing Triton."""
LIMITS = {  # whether q has more than 16 bits: largest head dim, largest codes
    False: (128, 64),
    True: (64, 32),
}
