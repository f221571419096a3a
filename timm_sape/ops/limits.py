"""What the Triton kernels take, known without importing Triton."""
MAX_HEAD_DIM = 128
MAX_CODE = 128
