"""Compile the Triton kernels as shipped for an H100/H200 (sm_90), without one: registers, spills, shared memory.

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

from timm_sape.ops import codes_triton
from timm_sape.ops import distances_triton as kernels
from timm_sape.ops.distances_triton import _padded as padded
from timm_sape.ops.limits import LIMITS

SHARED = 227 * 1024
INPUTS = {'Q', 'K', 'V', 'OUT', 'DOUT', 'DA', 'DV'}  # of the dtype of q
CODES_INPUTS = {'Q', 'K'}
SHAPES = [  # head dim, patches along x and y: every size after padding, and some in between
    (64, 8, 8), (64, 14, 14), (64, 24, 24), (64, 64, 64), (64, 32, 14), (64, 14, 32), (64, 14, 64), (64, 64, 1),
    (64, 1, 7), (64, 3, 4), (32, 14, 14), (32, 32, 32), (32, 64, 64), (48, 16, 16), (16, 16, 16), (128, 14, 14),
    (128, 32, 32), (128, 64, 64), (64, 64, 3), (128, 14, 2), (128, 64, 1), (80, 24, 16)]
QUICK = [(64, 14, 14), (64, 24, 24), (64, 1, 7), (128, 64, 64)]


def compile_kernel(kernel, constants, warps, stages, dtype, inputs):
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = 'constexpr'
        elif name.isupper():
            norms = 'fp64' if dtype == 'fp32' else 'fp32'
            signature[name] = '*' + (dtype if name in inputs else norms if name in ('SX', 'SY') else 'fp32')
            if name not in ('Z', 'DZ'):  # along y they begin behind the values along x
                attrs[index,] = [['tt.divisibility', 16]]
        else:
            signature[name] = 'i32'
            if re.match('s[qkv]_', name):  # strides of rows of 16 numbers or more
                attrs[index,] = [['tt.divisibility', 16]]
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget('cuda', 90, 32), options={'num_warps': warps, 'num_stages': stages})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, 'kernel.cubin')
        cubin.write_bytes(compiled.asm['cubin'])
        tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
        usage = subprocess.run(
            [tool, '--dump-resource-usage', cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r'REG:(\d+) STACK:(\d+)', usage).groups())
    return registers, stack, compiled.metadata.shared


def main():
    quick = '--quick' in sys.argv[1:]
    compiled, failed = 0, 0
    for dtype, itemsize in (('bf16', 2), ('fp32', 4)):
        for head_dim, width, height in QUICK if quick else SHAPES:
            if head_dim > LIMITS[itemsize > 2][0] or max(width, height) > LIMITS[itemsize > 2][1]:
                continue
            d, cx, cy = padded(head_dim), padded(width), padded(height)
            shape = d, (width, height), itemsize
            common = dict(
                HEAD_DIM=head_dim, D=d, CX=cx, CY=cy, WIDTH_X=width, WIDTH_Y=height, P=1, TOL=16 * 2.0 ** -23,
                PRECISION='tf32x3', DTYPE=tl.float32)
            blocks = kernels.forward_blocks(*shape)
            jobs = [('forward', kernels._forward, blocks, dict(common, OWN=blocks.own, WALK=blocks.walk))]
            for part in kernels.backward_parts(*shape):
                gradients = [flag for flag, on in zip(part._fields[2:], part[2:]) if on]
                name = f'backward of {"k" if part.keys else "q"}: {", ".join(gradients)}'
                constants = dict(common, **part.constants(), GRADIENT='tf32' if itemsize <= 2 else 'tf32x3')
                jobs.append((name, kernels._backward, part.blocks, constants))
            launches = [
                (name, kernel, blocks.warps, blocks.stages, constants, INPUTS)
                for name, kernel, blocks, constants in jobs]
            for length in sorted({width, height}):
                for sources in (1, 2) if 2 * length <= LIMITS[itemsize > 2][1] else (1,):
                    constants = dict(
                        codes_triton.tiles_for(head_dim, length, length + 1), HEAD_DIM=head_dim, NPOS=length + 1,
                        SOURCES=sources, DTYPE=tl.float32, **codes_triton.PRECISIONS[itemsize > 2])
                    gradient = dict(constants, GRADIENT='ieee' if itemsize > 2 else 'tf32')
                    launches += [
                        (f'{sources} x codes of {length}, {name}', kernel, codes_triton.warps_for(length, itemsize), 1,
                         values, CODES_INPUTS)
                        for name, kernel, values in (
                            ('forward', codes_triton._forward, constants),
                            ('backward, values', codes_triton._backward_values, constants),
                            ('backward, x', codes_triton._backward_tokens, dict(gradient, ADD=False)),
                            ('backward, y', codes_triton._backward_tokens, dict(gradient, ADD=True)))]
            for name, kernel, warps, stages, constants, inputs in launches:
                registers, stack, shared = compile_kernel(kernel, constants, warps, stages, dtype, inputs)
                bad = stack > 0 or shared > SHARED
                compiled, failed = compiled + 1, failed + bad
                print(f'{dtype} d={head_dim} {width}x{height} {name} {warps} warps: {registers} registers, '
                      f'stack {stack}, shared {shared // 1024} KiB{"  <- BAD" if bad else ""}', flush=True)
    if failed:
        sys.exit(f'{failed} of {compiled} kernels spill registers or want too much shared memory with Triton '
                 f'{triton.__version__}')
    print(f'{compiled} kernels, no spills with Triton {triton.__version__}')


if __name__ == '__main__':
    main()
