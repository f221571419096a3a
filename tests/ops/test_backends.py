"""Which backend runs: the argument, the environment variable or the device decide, and what the messages say."""
import logging
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import timm_sape
from common import Maker
from operators import DEVICE
from timm_sape.ops import backend as selection
from timm_sape.ops.backend import choose_backend, using_backend


def chosen(requested=None, q=None, widths=(3, 4), needs=''):
    q = torch.zeros(1, 1, 2, 8) if q is None else q
    return choose_backend(requested, q, widths, {needs: True} if needs else {})


@pytest.mark.parametrize('built', [True, False])
def test_automatic(monkeypatch, built):
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    monkeypatch.setattr(selection, 'find_cpp', lambda: '' if built else 'they have not been compiled')
    fastest = 'cpp' if built else 'torch'
    assert chosen() == fastest
    assert chosen(needs='a mask') == 'reference'
    assert chosen(q=torch.zeros(1, 1, 2, 256, dtype=torch.bfloat16)) == fastest
    with torch.device('meta'):
        assert chosen(q=torch.zeros(1, 1, 2, 8)) == 'torch'


def test_argument_before_variable_before_automatic(monkeypatch):
    monkeypatch.setattr(selection, 'find_cpp', lambda: 'they have not been compiled')
    with using_backend('reference'):
        assert chosen() == 'reference'
        assert chosen('torch') == 'torch'
    with using_backend(''):
        assert chosen() == 'torch'


@pytest.mark.parametrize('before', [None, 'reference'])
def test_variable_is_restored(before, monkeypatch):
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    if before is not None:
        monkeypatch.setenv('TIMM_SAPE_BACKEND', before)
    for within in ('torch', None):
        with using_backend(within):
            assert os.environ.get('TIMM_SAPE_BACKEND') == within
        assert os.environ.get('TIMM_SAPE_BACKEND') == before


@pytest.mark.parametrize('requested, kwargs, text', [
    ('fast', {}, r"Unknown backend 'fast' \(backend=\)"),
    ('torch', {'needs': 'a mask'}, r"'torch' \(backend=\) cannot be used: only the reference supports a mask"),
    ('cpp', {'needs': 'a mask'}, r"'cpp' \(backend=\) cannot be used: only the reference supports a mask"),
    ('cpp', {'q': torch.zeros(1, 1, 2, 8, device='meta')}, 'its kernels run on the CPU, not on meta'),
    ('triton', {'widths': (3, 65)}, 'in torch.float32 .* a head dim of 64 and codes of 32 entries at most'),
    ('triton', {'widths': (3, 32), 'q': torch.zeros(1, 1, 1, 128)}, 'a head dim of 64'),
    ('triton', {'q': torch.zeros(1, 1, 1, 160, dtype=torch.bfloat16)}, 'a head dim of 128'),
])
def test_no_silent_way_out(requested, kwargs, text):
    if requested == 'triton':
        kwargs = {**kwargs, 'q': kwargs.get('q', torch.zeros(1, 1, 2, 8)).to(DEVICE)}
    with pytest.raises(ValueError, match=text):
        chosen(requested, **kwargs)
    text = text.replace('backend=', 'TIMM_SAPE_BACKEND')
    with using_backend(requested), pytest.raises(ValueError, match=text):
        chosen(**kwargs)


def test_on_a_gpu_kernels_run_compiled(monkeypatch):
    """Also if the environment asks for the interpreter."""
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    runpy.run_path(Path(__file__).parents[1] / 'conftest.py')
    assert 'TRITON_INTERPRET' not in os.environ


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    with pytest.raises(ValueError, match='NVIDIA GPU, or the CPU with TRITON_INTERPRET=1'):
        chosen('triton')


class Gpu:
    """What `choose_backend` looks at of q on a GPU."""
    device = torch.device('cuda:1')

    def __init__(self, head_dim, dtype=torch.bfloat16):
        self.shape, self.dtype = (1, 2, 16, head_dim), dtype


@pytest.mark.parametrize('capability, memory, head_dim, width, text', [
    ((7, 5), 64, 64, 14, r'Triton needs compute capability 8.0, and this GPU has 7.5'),
    ((8, 6), 99, 64, 40, 'in torch.bfloat16, for a head dim of 64 and codes of 40 entries, its kernels need 163 KiB'),
    ((8, 9), 99, 80, 14, 'for a head dim of 80 and codes of 14 entries, .* 163 KiB .*, and this GPU has 99'),
    ((8, 6), 99, 64, 32, ''),
    ((8, 0), 163, 128, 64, ''),
    ((10, 3), 227, 64, 14, 'on GPUs of compute capability 10.3 some versions of Triton compile them into wrong code'),
    ((12, 0), 99, 64, 14, ''),
])
@pytest.mark.parametrize('compiler', [True, False])
def test_gpus_that_triton_would_fail_on(monkeypatch, capability, memory, head_dim, width, text, compiler):
    """Known before a kernel is launched: then it is torch unless Triton was requested."""
    class Driver:
        @property
        def active(self):
            if not compiler:
                raise RuntimeError('Failed to find C compiler')
            return SimpleNamespace(get_current_device=lambda: 0)

    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    monkeypatch.setattr('triton.runtime.driver', Driver())
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda index: SimpleNamespace(
        major=capability[0], minor=capability[1], shared_memory_per_block_optin=1024 * memory))
    monkeypatch.setattr(selection, '_gpu', selection._gpu.__wrapped__)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: capability)
    q = Gpu(head_dim)
    monkeypatch.setattr(selection, 'TRITON_TESTED_ON', {capability: 'this GPU'})
    if not compiler and not text.startswith(('Triton needs', 'on GPUs')):
        text = r'Triton does not start \(Failed to find C compiler\)'
    assert chosen(q=q, widths=(width, 3)) == ('torch' if text else 'triton')
    if text:
        with pytest.raises(ValueError, match=text):
            chosen('triton', q=q, widths=(width, 3))


@pytest.mark.parametrize('device, expected', [('cuda:0', 'torch'), ('cuda:1', 'triton'), ('cuda', 'torch')])
def test_one_of_two_gpus(monkeypatch, device, expected):
    """That of the tensor decides, and 'cuda' is the current one."""
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    capabilities = [(8, 6), (9, 0)]
    monkeypatch.setattr('triton.runtime.driver', SimpleNamespace(
        active=SimpleNamespace(get_current_device=lambda: 0)))
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda index: SimpleNamespace(
        major=capabilities[index][0], minor=capabilities[index][1],
        shared_memory_per_block_optin=1024 * (99, 227)[index]))
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: capabilities[index or 0])
    monkeypatch.setattr(selection, '_gpu', selection._gpu.__wrapped__)
    monkeypatch.setattr(selection, 'TRITON_TESTED_ON', {(9, 0): 'the second GPU'})
    q = Gpu(64)
    q.device = torch.device(device)
    assert chosen(q=q) == expected
    if expected == 'torch':  # it has less memory, too
        with pytest.raises(ValueError, match='this GPU has 99'):
            chosen('triton', q=q, widths=(40, 3))
    else:
        assert chosen('triton', q=q, widths=(40, 3)) == 'triton'


def test_without_triton(monkeypatch):
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    monkeypatch.setattr(selection.importlib.util, 'find_spec', lambda name: None)
    assert chosen(q=Gpu(64)) == 'torch'
    with pytest.raises(ValueError, match='Triton is not installed'):
        chosen('triton')


def test_float64_on_a_gpu(monkeypatch):
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    monkeypatch.setattr(selection, '_gpu', lambda index: ('', 227))
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: (9, 0))
    q = Gpu(64, torch.float64)
    assert chosen(q=q) == 'torch'
    with pytest.raises(ValueError, match='on a GPU its kernels do not take float64'):
        chosen('triton', q=q)


def test_a_gpu_that_is_not_from_nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, 'hip', '7.0')
    monkeypatch.setattr(selection, '_gpu', lambda index: ('', 227))
    with pytest.raises(ValueError, match='do not run on this device: they need an NVIDIA GPU'):
        chosen('triton', q=Gpu(64))


@pytest.mark.parametrize('width, memory', [(16, 99), (24, 163)])
def test_float32_needs_more_memory(monkeypatch, width, memory):
    q = Gpu(64, torch.float32)
    monkeypatch.setattr(selection, '_gpu', lambda index: ('', memory))
    assert chosen('triton', q=q, widths=(width, 3)) == 'triton'
    monkeypatch.setattr(selection, '_gpu', lambda index: ('', memory - 1))
    with pytest.raises(ValueError, match=f'in torch.float32, .* need {memory} KiB .*, and this GPU has {memory - 1}'):
        chosen('triton', q=q, widths=(width, 3))


@pytest.mark.parametrize('tested_on', [None, (8, 0), (9, 0)])
def test_kernels_that_no_such_gpu_has_run_must_be_asked_for(monkeypatch, caplog, tested_on):
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    monkeypatch.setattr(selection, '_gpu', lambda index: ('', 227))
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: (9, 0))
    monkeypatch.setattr(selection, 'TRITON_TESTED_ON', {tested_on: 'a GPU, 2027-01-31'} if tested_on else {})
    selection._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger='timm_sape'):
        assert chosen(q=Gpu(64)) == ('triton' if tested_on == (9, 0) else 'torch')
    line, = caplog.records
    text = 'no GPU of compute capability 9.0 has run their tests yet; TIMM_SAPE_BACKEND=triton selects them'
    assert (text in line.message, line.levelname) == (
        (False, 'INFO') if tested_on == (9, 0) else (True, 'WARNING'))
    assert chosen('triton', q=Gpu(64)) == 'triton'
    with using_backend('triton'):
        assert chosen(q=Gpu(64)) == 'triton'


@pytest.mark.parametrize('capability, dtype, expected', [
    ((9, 0), torch.float32, 'triton'),
    ((8, 9), torch.float32, 'torch'),
    ((12, 0), torch.float32, 'torch'),
    ((8, 9), torch.float16, 'triton'),
])
def test_float32_where_float64_is_slow(monkeypatch, capability, dtype, expected):
    monkeypatch.setattr(selection, 'TRITON_TESTED_ON', {capability: 'this GPU'})
    monkeypatch.setattr(selection, '_gpu', lambda index: ('', 99))
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: capability)
    assert chosen(q=Gpu(64, dtype)) == expected
    assert chosen('triton', q=Gpu(64, dtype)) == 'triton'


@pytest.mark.parametrize('widths, needs, backend, text', [
    ((65, 3), '', 'torch', "the kernels of 'triton' would be faster, but in torch.bfloat16 its kernels take"),
    ((3, 3), 'a mask', 'reference', 'only it supports a mask; without that, this GPU would be faster'),
])
def test_python_shows_what_makes_a_gpu_slow(monkeypatch, caplog, widths, needs, backend, text):
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    monkeypatch.setattr(selection, '_gpu', lambda index: ('', 227))
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: (9, 0))
    selection._log_once.cache_clear()
    assert chosen(q=Gpu(64), widths=widths, needs=needs) == backend
    line, = caplog.records
    assert line.levelname == 'WARNING' and line.message.startswith(f'SaPE2 attention by backend {backend!r}: {text}')


@pytest.mark.parametrize('dtype, hip, text', [
    (torch.float32, None, "the kernels of 'triton' cannot be used: in torch.float32 its kernels take"),
    (torch.float64, None, "the kernels of 'triton' cannot be used: on a GPU its kernels do not take float64"),
    (torch.bfloat16, '7.0', 'the fastest on cuda'),
])
def test_no_warning_where_triton_would_not_be_faster(monkeypatch, caplog, dtype, hip, text):
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    monkeypatch.setattr(torch.version, 'hip', hip)
    monkeypatch.setattr(selection, '_gpu', lambda index: ('', 227))
    selection._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger='timm_sape'):
        assert chosen(q=Gpu(64, dtype), widths=(65, 3)) == 'torch'
    line, = caplog.records
    assert line.levelname == 'INFO' and line.message.startswith(f"SaPE2 attention by backend 'torch': {text}")


@pytest.mark.parametrize('compiled', [False, True])
def test_what_was_asked_for_is_no_warning(monkeypatch, caplog, compiled):
    make = Maker('sape2_k')
    torch.compiler.reset()
    model = torch.compile(make(), backend='eager', fullgraph=True) if compiled else make()
    selection._log_once.cache_clear()
    with using_backend('torch'), caplog.at_level(logging.INFO, logger='timm_sape'):
        model(make.images())
    assert [(r.levelname, r.message) for r in caplog.records if r.name == selection.__name__] == [
        ('INFO', "SaPE2 attention by backend 'torch': requested by TIMM_SAPE_BACKEND.")]


def test_one_line_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(selection, 'find_cpp', lambda: '')
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    selection._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger='timm_sape'):
        for _ in range(3):
            chosen()
        chosen(needs='a mask')
    assert [r.message for r in caplog.records] == [
        "SaPE2 attention by backend 'cpp': the fastest on cpu.",
        "SaPE2 attention by backend 'reference': only it supports a mask."]


@pytest.mark.parametrize('kwargs, call, text', [
    ({'attn_drop_rate': 0.1}, {}, 'dropout of the probabilities'),
    ({}, {'is_causal': True}, 'a mask or another bias'),
    ({'pos_enc': 'cope+sape2_k'}, {}, 'a mask or another bias'),
    ({'pos_enc': 'alibi2d+sape2_k'}, {}, 'a mask or another bias'),
])
def test_models_say_what_only_the_reference_supports(kwargs, call, text):
    assert all(part in timm_sape.list_encodings() for part in kwargs.get('pos_enc', 'nope').split('+'))
    make_model = Maker(kwargs.get('pos_enc', 'sape2_k'))
    model = make_model(**{name: value for name, value in kwargs.items() if name != 'pos_enc'}).train()
    model(make_model.images(), **call)
    with using_backend('torch'), pytest.raises(ValueError, match=f'only the reference supports {text}'):
        model(make_model.images(), **call)


def test_attention_that_is_not_fused_needs_the_reference():
    make_model = Maker('sape2_k')
    model = make_model()
    for block in model.blocks:
        block.attn.fused_attn = False
    model(make_model.images())
    with using_backend('torch'), pytest.raises(ValueError, match='only the reference supports attention that is not'):
        model(make_model.images())
