"""Compile the Triton kernels as our operators launch them, without a GPU: registers, spills, shared memory.

    python .ci/check_spills.py [--quick] [--arch 90] [--output FILE.csv]

For an H100/H200 (90) it fails on a kernel that spills more than MAX_SPILL bytes a thread, and everywhere on more shared
memory than `timm_sape.ops.triton_limits` says that a shape needs. The table also has the instructions of the largest
loop, in which a kernel of attention visits its tokens, divided by the logits that the loop computes; and the time that
issuing them takes at least, on the 132 multiprocessors of an H200 at 1.755 GHz with four instructions of 32 threads a
clock.
"""
import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from timm_sape.ops.triton_limits import limits_of, shared_memory
from timm_sape.ops.triton_operators import (
    triton_axis_codes, triton_axis_codes_backward, triton_distance_attention_backward,
    triton_distance_attention_forward)

NUM_HEADS, BATCH_SIZE = 6, 2
# Bytes of registers that a thread may spill. Storing and loading them are instructions of the loop. For some shapes
# there are fewer of them all the same than with smaller tiles, or in several launches. Triton 3.6 spills more in some.
# The kernels of attention do so for codes of 64 entries and, forward, of less than 5; those of the codes for long heads
# and lines of many patches.
MAX_SPILL = {'triton_distances': 512, 'triton_codes': 1000, 'triton_prepare': 160}
# Head dim, patches along x and y: every size after padding, and some in between. Last, with tables of another grid.
SHAPES = [
    (64, 8, 8), (64, 14, 14), (64, 24, 24), (64, 64, 64), (64, 32, 14), (64, 14, 32), (64, 14, 64), (64, 64, 1),
    (64, 1, 7), (64, 3, 4), (64, 16, 16), (32, 14, 14), (32, 32, 32), (32, 64, 64), (48, 16, 16), (16, 16, 16),
    (128, 14, 14), (128, 32, 32), (128, 64, 64), (128, 64, 32), (64, 64, 3), (128, 14, 2), (128, 64, 1), (80, 24, 16),
    (128, 20, 4), (100, 60, 60), (64, 14, 14, 24, 24), (64, 24, 24, 14, 14)]
QUICK = [(64, 14, 14), (64, 24, 24), (64, 1, 7), (128, 14, 14), (128, 64, 64)]


class Driver:
    """Stands in for Triton's driver: the methods that launching a kernel calls."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget('cuda', self.arch, 32)


def dump(cubin, option):
    """What NVIDIA's cuobjdump says about a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'kernel.cubin')
        path.write_bytes(cubin)
        tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
        return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def used(cubin):
    """Registers per thread, and bytes of stack per thread, of a compiled kernel."""
    return map(int, re.search(r'REG:(\d+) STACK:(\d+)', dump(cubin, '--dump-resource-usage')).groups())


def loop_length(cubin):
    """Instructions of the longest loop in the machine code: from the target of a jump back to the jump."""
    code = re.findall(r'/\*([0-9a-f]{4,})\*/ +(?:@\S+ +)?(\S+) *([^;]*);', dump(cubin, '-sass'))
    places = [int(place, 16) for place, _, _ in code]
    longest = 0
    for place, (_, name, arguments) in zip(places, code):
        target = re.search(r'0x([0-9a-f]+)', arguments) if name.startswith('BRA') else None
        if target and int(target[1], 16) < place:
            longest = max(longest, sum(int(target[1], 16) <= p <= place for p in places))
    return longest


def launch_all(dtype, head_dim, width, height, trained, num_prefix_tokens, mode):
    """Launch the four operators, on inputs with the memory layout of timm's attention."""
    num_tokens = num_prefix_tokens + height * width
    q, k, v = torch.zeros(BATCH_SIZE, num_tokens, 3, NUM_HEADS, head_dim, dtype=dtype).permute(2, 0, 3, 1, 4)
    tables = tuple(torch.zeros(size + 1, head_dim) for size in trained or (width, height))
    inputs = q, k, *tables
    options = height, width, mode, 0.1, *((0.7, 0.7) if trained else (1.0, 1.0))  # shrunk to the trained grid
    codes = triton_axis_codes._init_fn(*inputs, *options)
    triton_axis_codes_backward._init_fn(*codes, *inputs, *options)
    if mode != 'qk':  # for both, the distances are those of codes of another width
        inputs = q, k, v, *codes, torch.ones(1)
        out = triton_distance_attention_forward._init_fn(*inputs, 0.1)
        triton_distance_attention_backward._init_fn(out[0], *out, *inputs, 0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--quick', action='store_true', help='a few shapes')
    parser.add_argument('--arch', type=int, default=90, help='compute capability, times ten (default: %(default)s)')
    parser.add_argument('--output', type=Path, metavar='FILE', help='write a table of all kernels')
    args = parser.parse_args()
    driver.set_active(Driver(args.arch))
    run, counts, label, allowed, rows = JITFunction.run, Counter(), {}, 0, []

    def compile_and_look(self, *tensors, grid, warmup, **options):
        compiled = run(self, *tensors, grid=grid, warmup=True, **options)
        registers, stack = used(compiled.asm['cubin'])
        shared = compiled.metadata.shared / 1024
        module = self.fn.__module__.split('.')[-1]
        bad = stack > MAX_SPILL[module] and args.arch == 90 or shared > allowed
        names = 'KEY_PASS', 'DELTA_ONLY', 'GRAD_TOKENS', 'GRAD_X', 'GRAD_Y', 'ADD'
        flags = [name for name in names if options.get(name)]
        counts.update(kernels=1, bad=bad, spilling=stack > 0)
        name = f'{module}.{self.fn.__name__}'
        print(
            *label.values(), name, *flags,
            f'{registers} registers, stack {stack}, shared {shared:.1f} KiB{"  <- BAD" if bad else ""}', flush=True)
        if args.output is not None:
            row = {
                **label, 'kernel': name, 'pass': ' '.join(flags), 'registers': registers, 'stack': stack,
                'shared_kib': round(shared, 1)}
            if 'OWN' in options:
                logits = options['OWN'] * options['VISIT'] / (32 * options['num_warps'])  # of a thread
                loop = loop_length(compiled.asm['cubin'])
                least_ps = loop / logits / 128 / 132 / 1.755e-3
                row.update(loop=loop, per_logit=round(loop / logits, 1), least_ps=round(least_ps, 2))
            rows.append(row)
        return compiled

    JITFunction.run = compile_and_look
    for dtype in (torch.bfloat16, torch.float32, *([torch.float16] if args.quick else [])):
        max_head_dim, max_code = limits_of(dtype)
        for head_dim, width, height, *trained in QUICK if args.quick else SHAPES:
            for num_prefix_tokens, mode in ((1, 'k'), (0, 'k'), (1, 'qk')):
                code = len(mode) * max(width, height, *trained)
                if head_dim > max_head_dim or code > max_code or args.quick and not num_prefix_tokens:
                    continue
                grid = f'{width}x{height}' + (', tables of {}x{}'.format(*trained) if trained else '')
                label = {
                    'dtype': str(dtype).removeprefix('torch.'), 'head_dim': head_dim, 'grid': grid,
                    'prefix': num_prefix_tokens, 'mode': mode}
                allowed = shared_memory(head_dim, code, dtype.itemsize)
                launch_all(dtype, head_dim, width, height, trained, num_prefix_tokens, mode)
    if args.output is not None:
        with open(args.output, 'w', newline='') as file:
            names = dict.fromkeys(name for row in rows for name in row)
            writer = csv.DictWriter(file, [*names, 'notes'], restval='')
            writer.writeheader()
            notes = f'sm_{args.arch}, Triton {triton.__version__}, torch {torch.__version__}'
            writer.writerows({**row, 'notes': notes} for row in rows)
    if not counts['kernels']:
        sys.exit('no kernel was compiled')
    if counts['bad']:
        sys.exit(f'{counts["bad"]} of {counts["kernels"]} kernels spill more bytes than {MAX_SPILL} or need too much '
                 f'shared memory with Triton {triton.__version__}')
    limit = f', none more than {MAX_SPILL} bytes' if args.arch == 90 else ''
    print(f'{counts["kernels"]} kernels, {counts["spilling"] or "none"} of which spill{limit}, for sm_{args.arch} with '
          f'Triton {triton.__version__}')


if __name__ == '__main__':
    main()
