"""Compile the Triton kernels for an H100/H200 (sm_90), without one, as they are shipped: registers, spills, shared memory.

Fails on any spill (a stack frame in the machine code) and on more shared memory than the chip has.
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from timm_sape.ops import distances_triton as kernels

SHARED = 227 * 1024
POINTERS_OF_INPUTS = {'Q', 'K', 'V', 'OUT', 'DOUT', 'DA', 'DV'}
SHAPES = [  # head dim, patches along x and y
    (64, 8, 8), (64, 14, 14), (64, 24, 24), (64, 32, 32), (64, 64, 64), (32, 14, 14), (48, 16, 16), (128, 14, 14),
    (128, 32, 32), (64, 128, 128), (64, 1, 7)]


def padded(n):
    return max(16, triton.next_power_of_2(n))


def compile_kernel(kernel, constants, blocks, dtype):
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = 'constexpr'
        elif name.isupper():
            signature[name] = f'*{dtype}' if name in POINTERS_OF_INPUTS else '*fp32'
            attrs[index,] = [['tt.divisibility', 16]]
        else:
            signature[name] = 'i32'
            if name.startswith('s'):  # strides of rows of 16 numbers or more
                attrs[index,] = [['tt.divisibility', 16]]
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget('cuda', 90, 32), options={'num_warps': blocks.warps, 'num_stages': blocks.stages})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, 'kernel.cubin')
        cubin.write_bytes(compiled.asm['cubin'])
        tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
        usage = subprocess.run(
            [tool, '--dump-resource-usage', cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r'REG:(\d+) STACK:(\d+)', usage).groups())
    return registers, stack, compiled.metadata.shared


def main():
    failed = 0
    for dtype in ('bf16', 'fp32'):
        for head_dim, width, height in SHAPES:
            for name in ('forward', 'backward of q', 'backward of k, v'):
                d, cx, cy = padded(head_dim), padded(width), padded(height)
                forward = name == 'forward'
                item = 4 if dtype == 'fp32' else 2
                blocks = (kernels.forward_blocks if forward else kernels.backward_blocks)(d, cx + cy, item)
                constants = dict(
                    HEAD_DIM=head_dim, D=d, CX=cx, CY=cy, WIDTH_X=width, WIDTH_Y=height, P=1, OWN=blocks.own,
                    WALK=blocks.walk, TOL=16 * 2.0 ** -23, PRECISION='tf32x3', DTYPE=tl.float32)
                if not forward:
                    constants['KEYS'] = name != 'backward of q'
                kernel = kernels._forward if forward else kernels._backward
                registers, stack, shared = compile_kernel(kernel, constants, blocks, dtype)
                bad = stack > 0 or shared > SHARED
                failed += bad
                print(f'{dtype} d={head_dim} {width}x{height} {name:16} {tuple(blocks)}: {registers} registers, '
                      f'stack {stack}, shared {shared // 1024} KiB{"  <- BAD" if bad else ""}', flush=True)
    if failed:
        sys.exit(f'{failed} configurations spill registers or want too much shared memory')


if __name__ == '__main__':
    main()
