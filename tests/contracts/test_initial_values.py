"""Initial values: every parameter and buffer gets one, also after construction without memory."""
import copy
import itertools

import torch
from timm.models._manipulate import reinit_non_persistent_buffers

from common import GRIDS, Maker
from contract_tools import ONE_GRID, Contracts, same

contracts = Contracts()


def poison(model):
    """Fill all parameters and buffers with NaN."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.data.fill_(float('nan'))


def check_initial(model, like):
    """No value is missing, and those of encodings are about as large as in `like`."""
    for (name, actual), expected in zip(
            itertools.chain(model.named_parameters(), model.named_buffers()),
            itertools.chain(like.parameters(), like.buffers()), strict=True):
        assert actual.isfinite().all(), f'{name} was not initialised'
        if 'encodings.' in name or name == 'pos_embed':
            a, b = (tensor.square().mean().sqrt().item() for tensor in (actual, expected))
            few = actual.numel() ** -0.5
            factor = 1.5 + 3 * few + 6 * few ** 2  # few draws spread widely
            assert b / factor <= a <= factor * b, f'{name} starts at {a:.3g} instead of {b:.3g}'


@contracts.add(grids=GRIDS[:2], takes_long=True)
def init_weights(make):
    """Every mode gives every parameter and buffer a value. Those of encodings are as after construction."""
    for mode in ('', 'jax', 'jax_nlhb', 'moco', 'reset'):
        torch.manual_seed(0)
        fresh = make(random=False, init_values=0.1, weight_init='' if mode == 'reset' else mode)
        model = make(init_values=0.1)
        poison(model)
        torch.manual_seed(0)
        model.init_weights(mode)
        check_initial(model, fresh)
        once = copy.deepcopy(model)
        torch.manual_seed(0)
        model.init_weights(mode)
        for (name, a), b in zip(model.named_parameters(), once.parameters()):
            assert torch.equal(a, b), f'{name} is not reproducible'
        assert model.eval()(make.images()).isfinite().all()


@contracts.add(grids=ONE_GRID)
def weight_init_skip(make):
    torch.manual_seed(0)
    model = make(random=False, weight_init='skip')
    poison(model)
    model.init_weights()
    check_initial(model, make(random=False))
    model = make(random=False, weight_init='skip')
    poison(model)
    reinit_non_persistent_buffers(model)
    model.load_state_dict(make().state_dict())
    same(model(make.images()), make()(make.images()), 'loaded model', tol=1e-6)


@contracts.add(grids=ONE_GRID)
def fix_init(make):
    """timm's scaling by depth. It leaves the initial values of encodings alone."""
    states = []
    for fix in (False, True):
        torch.manual_seed(0)
        states.append(make(random=False, fix_init=fix).state_dict())
    for name, plain in states[0].items():
        scaled = name.endswith(('attn.proj.weight', 'mlp.fc2.weight')) and 'encodings.' not in name
        scale = (2 * (int(name.split('.')[1]) + 1)) ** -0.5 if scaled else 1
        same(states[1][name], scale * plain, f'fix_init of {name}', tol=1e-6)


@contracts.add(grids=ONE_GRID)
def same_backbone(make):
    """With the same seed, models that differ in their encodings only start from the same backbone."""
    for mode in ('', 'jax', 'moco'):
        states = []
        for maker in (make, Maker('nope', make.grid)):
            torch.manual_seed(3)
            states.append(maker(random=False, weight_init=mode).state_dict())
        for name, expected in states[1].items():
            assert torch.equal(states[0][name], expected), f'backbone starts elsewhere: {name}'


@contracts.add(grids=GRIDS[:2])
def meta_device(make):
    """Made without memory, then filled from a checkpoint, or initialised."""
    expected = make()
    x = make.images()

    def made(in_context, empty=True):
        if in_context:
            with torch.device('meta'):
                model = make(random=False)
        else:
            model = make(random=False, device='meta')
        assert all(t.is_meta for t in itertools.chain(model.parameters(), model.buffers())), 'memory on the meta device'
        if empty:
            model.to_empty(device='cpu')
            poison(model)
        return model

    def check_buffers(model):
        for (name, actual), buffer in zip(model.named_buffers(), expected.buffers(), strict=True):
            same(actual, buffer, f'buffer {name}', tol=1e-6)

    for in_context in (False, True):
        model = made(in_context)
        reinit_non_persistent_buffers(model)
        model.load_state_dict(expected.state_dict())
        check_buffers(model)
        same(model(x), expected(x), 'filled from a checkpoint', tol=1e-6)
        model = made(in_context)
        model.load_state_dict(expected.state_dict(), assign=True)
        reinit_non_persistent_buffers(model)
        same(model(x), expected(x), 'filled by assignment', tol=1e-6)
        if 'toy' not in make.pos_enc:  # buffers of a third party
            model = made(in_context, empty=False)
            model.load_state_dict(expected.state_dict(), assign=True)
            same(model(x), expected(x), 'filled by assignment alone', tol=1e-6)
            same(model.to('cpu')(x), expected(x), 'filled by assignment alone, then moved', tol=1e-6)
            model = made(in_context, empty=False)
            model.load_state_dict(expected.state_dict(), assign=True)
            with torch.no_grad():
                rounded, exact = (m.bfloat16()(x.bfloat16()) for m in (model, copy.deepcopy(expected)))
            same(rounded, exact, 'filled by assignment alone, then in half precision', tol=1e-6)
        model = made(in_context)
        torch.manual_seed(0)
        model.init_weights()
        check_buffers(model)
        check_initial(model, make(random=False))
    model = make(random=False)
    model.to_empty(device='cpu')  # it had memory
    if 'toy' in make.pos_enc:  # buffers of a third party
        reinit_non_persistent_buffers(model)
    model.load_state_dict(expected.state_dict())
    check_buffers(model)
    same(model(x), expected(x), 'emptied and filled', tol=1e-6)


test_contract = contracts.test()
