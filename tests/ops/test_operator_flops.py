"""What torch's FLOP counter says of our operators, against counts by hand: two for each multiplication in a product."""
import os
import subprocess
import sys

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import timm_sape
from operators import DEVICE, FULL_WITHOUT_GPU, device_of, make_inputs
from timm_sape import ops
from timm_sape.functional import sape2_attention
from timm_sape.ops import (
    cpp_operators, reference, torch_codes, torch_contextual, torch_distances, triton_operators)
from timm_sape.ops.backend import using_backend

B, HEADS, HEIGHT, WIDTH, PREFIX, DIM, NPOS_X, NPOS_Y = 2, 3, 4, 5, 2, 8, 7, 6
PATCHES = HEIGHT * WIDTH
TOKENS = PREFIX + PATCHES


def product(rows, inner, columns):
    """FLOPs of a matrix product."""
    return 2 * rows * inner * columns


def count(function, *args):
    """FLOPs, and what the function returns."""
    with FlopCounterMode(display=False) as counter:
        found = function(*args)
    return counter.get_total_flops(), found


def codes_by_hand(mode):
    """Gates of each row and each column, and the products of each source with the tables."""
    gates = HEIGHT * product(WIDTH, DIM, WIDTH) + WIDTH * product(HEIGHT, DIM, HEIGHT)
    values = product(PATCHES, DIM, NPOS_X) + product(PATCHES, DIM, NPOS_Y)
    return B * HEADS * (gates + len(mode) * values)


def codes_backward_by_hand(mode):
    gates, values = 0, 0
    for lines, length in ((HEIGHT, WIDTH), (WIDTH, HEIGHT)):
        gates += lines * product(length, DIM, length)  # the gates again
        gates += lines * product(length, length, DIM)  # gradient of q
        gates += lines * product(length, length, DIM)  # gradient of k
    for npos in (NPOS_X, NPOS_Y):
        values += product(PATCHES, DIM, npos)  # the values again
        values += product(PATCHES, npos, DIM)  # gradient of the source
        values += product(npos, PATCHES, DIM)  # gradient of the table
    return B * HEADS * (gates + len(mode) * values)


def attention_by_hand(mode):
    distances = sum(product(TOKENS, len(mode) * width, TOKENS) for width in (WIDTH, HEIGHT))
    logits, out = product(TOKENS, DIM, TOKENS), product(TOKENS, TOKENS, DIM)
    return B * HEADS * (distances + logits + out)


def attention_backward_by_hand(mode):
    total = 0
    for width in (len(mode) * WIDTH, len(mode) * HEIGHT):
        total += product(TOKENS, width, TOKENS)  # the distances again
        total += product(TOKENS, TOKENS, width)  # R w
        total += product(TOKENS, TOKENS, width)  # R^T w
    total += product(TOKENS, DIM, TOKENS)  # the logits again
    total += product(TOKENS, TOKENS, DIM)  # gradient of v
    total += product(TOKENS, DIM, TOKENS)  # gradient of the probabilities
    total += product(TOKENS, TOKENS, DIM)  # gradient of q
    total += product(TOKENS, TOKENS, DIM)  # gradient of k
    return B * HEADS * total


def make(device):
    inputs = make_inputs((HEIGHT, WIDTH), PREFIX, heads=HEADS, dim=DIM, batch=B)
    inputs[3], inputs[4] = torch.randn(NPOS_X, DIM), torch.randn(NPOS_Y, DIM)
    return [t.float().to(device) for t in inputs]


@pytest.mark.parametrize('mode', ['k', 'qk'])
@pytest.mark.parametrize('forward, backward', [
    (torch_codes.torch_axis_codes, torch_codes.torch_axis_codes_backward),
    (cpp_operators.cpp_axis_codes, cpp_operators.cpp_axis_codes_backward),
    (triton_operators.triton_axis_codes, triton_operators.triton_axis_codes_backward),
])
def test_codes(forward, backward, mode):
    """On the meta device, where nothing is computed: the count is of shapes alone."""
    q, k, _, table_x, table_y, _ = make('meta')
    args = q[:, :, PREFIX:], k[:, :, PREFIX:], table_x, table_y, HEIGHT, WIDTH, mode, 0.3, 1.0, 0.5
    flops, codes = count(forward, *args)
    assert flops == codes_by_hand(mode)
    flops, _ = count(backward, *codes, *args)
    assert flops == codes_backward_by_hand(mode)


@pytest.mark.parametrize('mode', ['k', 'qk'])
@pytest.mark.parametrize('forward, backward', [
    (torch_distances.torch_distance_attention, torch_distances.torch_distance_attention_backward),
    (cpp_operators.cpp_distance_attention_forward, cpp_operators.cpp_distance_attention_backward),
    (triton_operators.triton_distance_attention_forward, triton_operators.triton_distance_attention_backward),
])
def test_attention(forward, backward, mode):
    q, k, v, _, _, bias_scale = make('meta')
    codes = [torch.randn(B, HEADS, PATCHES, len(mode) * size, device=q.device) for size in (WIDTH, HEIGHT)]
    args = q, k, v, *codes, bias_scale, 0.3
    flops, out = count(forward, *args)
    assert flops == attention_by_hand(mode)
    saved = out if isinstance(out, tuple) else ()
    flops, _ = count(backward, torch.randn_like(v), *saved, *args)
    assert flops == attention_backward_by_hand(mode)


def test_cope():
    q, k = torch.randn(2, B, HEADS, PATCHES, DIM)
    args = q, k, torch.randn(NPOS_X, DIM), 0.3, False, 1.0
    flops, bias = count(torch_contextual.torch_contextual_bias, *args)
    gates, values = product(PATCHES, DIM, PATCHES), product(PATCHES, DIM, NPOS_X)
    assert flops == B * HEADS * (gates + values)
    flops, _ = count(torch_contextual.torch_contextual_bias_backward, bias, *args)
    gradients = 2 * product(PATCHES, PATCHES, DIM) + product(PATCHES, NPOS_X, DIM) + product(NPOS_X, PATCHES, DIM)
    assert flops == B * HEADS * (gates + values + gradients)


@pytest.mark.parametrize('backend, mode', [
    ('torch', 'q'), ('torch', 'k'), ('torch', 'qk'), ('cpp', 'k'), ('cpp', 'qk'),
    pytest.param('triton', 'k', marks=FULL_WITHOUT_GPU)])
def test_forward_and_backward_together(backend, mode):
    inputs = [t.requires_grad_() for t in make(device_of(backend))]

    def attention():
        *tensors, bias_scale = inputs
        return sape2_attention(
            *tensors, (HEIGHT, WIDTH), bias_scale=bias_scale, num_prefix_tokens=PREFIX, mode=mode, backend=backend)

    flops, out = count(attention)
    assert flops == codes_by_hand(mode) + attention_by_hand(mode)
    flops, _ = count(torch.autograd.grad, out.sum(), inputs)
    assert flops == codes_backward_by_hand(mode) + attention_backward_by_hand(mode)


@pytest.mark.full
@pytest.mark.skipif(DEVICE != 'cpu', reason='the interpreter makes it short')
def test_triton_counts_from_the_first_call():
    """The counter copies torch's list of formulas when it is made, and Triton is imported when it is first needed."""
    script = """
import torch
from timm_sape.functional import sape2_attention
from torch.utils.flop_counter import FlopCounterMode

tensors = torch.randn(3, 1, 1, 4, 8).unbind()
with FlopCounterMode(display=False) as counter:
    sape2_attention(*tensors, *torch.randn(2, 3, 8), (2, 2), backend='triton')
print(counter.get_total_flops())
"""
    done = subprocess.run(
        [sys.executable, '-c', script], capture_output=True, text=True, env={**os.environ, 'TRITON_INTERPRET': '1'})
    assert done.returncode == 0, done.stderr
    lines, values = 4 * product(2, 8, 2), 2 * product(4, 8, 3)
    assert int(done.stdout) == lines + values + 2 * product(4, 2, 4) + 2 * product(4, 8, 4)


def test_distances_of_the_reference_count_as_nothing():
    """As its docstring says: torch has no formula for cdist."""
    codes = torch.randn(1, 2, 9, 4, requires_grad=True)
    flops, distances = count(reference.pairwise_distance, codes)
    assert flops == 0
    assert count(torch.autograd.grad, distances.sum(), codes)[0] == 0
    assert count(lambda: codes @ codes.mT)[0] > 0  # the counter works


def count_model(pos_enc, training):
    """With the plain attention of PyTorch, of whose products the counter sees all."""
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, img_size=(32, 40), patch_size=8)
    x = torch.randn(2, 3, 32, 40)
    with sdpa_kernel(SDPBackend.MATH):
        return count(lambda: model(x).sum().backward() if training else model(x))[0]


@pytest.mark.parametrize('pos_enc', ['sape2_k', 'sape2_q', 'sape2_qk', 'cope'])
@pytest.mark.parametrize('training', [False, True])
def test_models_count_more_than_without_position(pos_enc, training):
    with using_backend('torch'):
        assert count_model(pos_enc, training) > count_model('nope', training) > 0


@pytest.mark.parametrize('training', [False, True])
def test_difference_to_a_model_without_position(training):
    """Layer by layer: codes and distances, and in training the logits, which are computed twice."""
    model = timm.create_model('test_vit_pos_enc', pos_enc='sape2_k')
    depth, heads, dim = len(model.blocks), model.blocks[0].attn.num_heads, model.blocks[0].attn.head_dim
    height, width, tokens = 4, 5, 4 * 5 + model.num_prefix_tokens
    lines = height * product(width, dim, width) + width * product(height, dim, height)
    values = product(height * width, dim, width + 1) + product(height * width, dim, height + 1)
    codes, distances = lines + values, product(tokens, width, tokens) + product(tokens, height, tokens)
    expected = codes + distances
    if training:
        expected += 3 * (codes + distances) + product(tokens, dim, tokens)
    with using_backend('torch'):
        assert count_model('sape2_k', training) - count_model('nope', training) == 2 * depth * heads * expected


def test_cope_in_a_model_counts_its_bias():
    grid = timm_sape.Grid(HEIGHT, WIDTH, PREFIX)
    q, k = torch.randn(2, B, HEADS, TOKENS, DIM)
    flops, _ = count(lambda: ops.contextual_bias(q, k, torch.randn(NPOS_X, DIM), grid, gate_scale=0.3))
    assert flops == B * HEADS * product(PATCHES, DIM, PATCHES + NPOS_X)
